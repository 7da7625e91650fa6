"""all_reduce(a) + all_reduce(b) -> all_reduce(a + b): the backward of q k v and of w1 w3 sends half the bytes or less.

    x1 -> all_reduce -> wait -> view* \\
                                        add         becomes     add(x1, x2) -> all_reduce -> wait
    x2 -> all_reduce -> wait -> view* /

Runs on the joint graph, before the partitioner, because it changes what is computed. Sound for "sum" and "avg" over the same
group when nothing else reads either result.
"""

from __future__ import annotations

from torch.fx import Graph, Node

from ..graph.aten import Effect, aten, dtype_of, element_effect, shape_of
from ..graph.emitter import Emitter
from ..graph.sizes import is_same_shape
from ..match.collectives import Collective, Op, find_collectives
from .joint_decision import joint_decision, record_decision


def merge_all_reduces(graph: Graph) -> int:
    """Merge in place. Return how many all_reduces were removed."""
    found = [c for c in find_collectives(graph) if c.op is Op.ALL_REDUCE and c.group is not None]
    reduces: dict[Node, Collective] = {c.wait: c for c in found if c.wait is not None}
    if len(reduces) < 2:
        return 0
    count = 0
    for node in list(graph.nodes):
        if node.target is not aten.add.Tensor or node.kwargs.get("alpha", 1) != 1 or len(node.args) != 2:
            continue
        sides = [_reduced(a, reduces) for a in node.args]
        a, b = sides
        if (
            a is None
            or b is None
            or a is b
            or (a.group, a.reduce_op) != (b.group, b.reduce_op)
            or a.reduce_op not in ("sum", "avg")
        ):
            continue
        if dtype_of(a.input) != dtype_of(b.input) or dtype_of(a.input) != dtype_of(node):
            continue
        if not all(is_same_shape(shape_of(x), shape_of(node)) for x in node.args):  # type: ignore[arg-type]
            continue
        merged = _merge(graph, node, a, b)
        assert merged.wait is not None
        reduces[merged.wait] = merged
        count += 1
    return count


def _reduced(node: object, reduces: dict[Node, Collective]) -> Collective | None:
    """Return the all_reduce that `node` is a view of, if it and all views in between have no other user."""
    while isinstance(node, Node) and len(node.users) == 1:
        if node in reduces:
            return reduces[node] if len(reduces[node].node.users) == 1 else None
        step = element_effect(node)
        if step is None or step.kind is not Effect.SAME:
            return None
        node = step.source
    return None


def _merge(graph: Graph, add: Node, a: Collective, b: Collective) -> Collective:
    e = Emitter(graph, a.node, {})
    shape = shape_of(add)
    with graph.inserting_before(add):
        total = e.call(aten.add.Tensor, e.reshape(a.input, shape), e.reshape(b.input, shape))
        reduce = e.call(a.node.target, total, a.reduce_op, a.group)
        wait = e.call(a.wait.target, reduce)  # type: ignore[union-attr]
    record_decision(reduce, merged_count=sum(joint_decision(c.node).merged_count for c in (a, b)))
    for key in ("partitioner_tag", "recompute", "ac_graph_id"):
        if key in add.meta:
            for n in (total, reduce, wait):
                n.meta[key] = add.meta[key]
    todo = [x for x in add.args if isinstance(x, Node)]
    add.replace_all_uses_with(wait)
    graph.erase_node(add)
    while todo:  # the old views, waits and all_reduces: c10d ops look impure, so dead-code elimination keeps them
        node = todo.pop()
        if node.users or node in (a.input, b.input):
            continue
        todo += node.all_input_nodes
        graph.erase_node(node)
    return Collective(Op.ALL_REDUCE, reduce, wait, total, a.group, a.ranks, a.reduce_op)

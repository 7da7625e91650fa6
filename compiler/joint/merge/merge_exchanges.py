"""Equal steps of a ring -> one: backward reads the keys and values that forward received.

    k, v -> cat -> all_to_all -> wait -> slices -> cat -> all_to_all -> wait        forward
    k, v -> cat -> all_to_all -> wait -> slices -> cat -> all_to_all -> wait        backward, merged with those of forward

torch's ring attention sends keys and values in backward again, by all_to_alls or by one all_gather. torch's partitioner merges
equal nodes. Of all_to_alls it sees the first steps only: forward spells a slice to the end `[n, 2**63 - 1]` and backward
`[n, 2 n]`. Up to 2.13 it merges every gather that backward repeats, with its wait; in 2.15 without the wait, so that nothing
overlaps it. What it does not merge depends on what a rank attends to, and ranks would send other numbers of messages.

Gathers are merged in joint graphs only, as the partitioner did. A graph of a whole step has no partitioner: what backward
gathers again there, the user wants gathered again.

Ranks must agree, and they hold other tensors. So no memory limit applies: results of forward live until backward has read
them, as those of a ring that gathers do. In a checkpointed region they do not: backward runs the kept step again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from torch.fx import Graph, Node
from torch.fx.node import map_arg

from ...graph.aten import (
    aten,
    c10d,
    dtype_of,
    is_elementwise,
    is_mutable,
    is_random,
    read_cut,
    shape_of,
    storage_node,
    written_memory,
)
from ...graph.joint_graph import is_in_backward, needs_tangents, region_of
from ...match.all_to_all import is_permute, split_args
from ...match.collectives import Collective, Op, read_again
from ..joint_decision import joint_decision, record_decision


def merge_exchanges(graph: Graph, exchanges: Sequence[Collective]) -> int:
    """Merge equal steps of rings among `exchanges`, and gathers that backward repeats. Return how many were removed."""
    again = _gathered_again(graph, exchanges)
    steps = {c.wait: c for c in exchanges if _is_step(c) or c.node in again}
    if not steps:
        return 0
    values = _Values(graph, {c.node for c in steps.values()})
    earlier: dict[Node, list[Collective]] = defaultdict(list)
    count = 0
    for node in list(graph.nodes):
        first = values.first_equal(node)
        if node not in steps:
            continue
        c = read_again(steps[node])  # what was merged before may be its input
        kept = next((k for k in earlier[first] if _may_replace(k, c, again) and not values.is_returned(k.node, c.node)), None)
        if kept is None:
            earlier[first].append(c)
            continue
        _replace(graph, c, kept)
        count += 1
    return count


def has_equal_exchanges(graph: Graph, exchanges: Sequence[Collective]) -> bool:
    """Return whether two of `exchanges` look like the same step of a ring, or like a gather that backward repeats."""
    steps = [c for c in exchanges if _is_step(c)]
    return len({(str(split_args(c)), *_key(c)) for c in steps}) < len(steps) or bool(_gathered_again(graph, exchanges))


def _key(c: Collective) -> tuple[object, ...]:
    return c.group, shape_of(c.input), dtype_of(c.input)


def _gathered_again(graph: Graph, collectives: Sequence[Collective]) -> dict[Node, bool]:
    """Return the gathers of a joint graph that look alike in forward and backward, and whether backward runs each.

    Those of backward need no gradient. An op of a user's autograd function has no tag: behind the first node that needs a
    gradient it is in backward.
    """
    alike: dict[tuple[object, ...], list[Node]] = defaultdict(list)
    for c in collectives:
        if c.op is Op.ALL_GATHER:
            alike[_key(c)].append(c.node)
    if not any(len(nodes) > 1 for nodes in alike.values()):
        return {}
    tangents = needs_tangents(graph)
    first = next((n for n in graph.nodes if n in tangents and n.op != "placeholder"), None)
    if first is None:
        return {}
    found: dict[Node, bool] = {}
    for nodes in alike.values():
        known = [n for n in nodes if n not in tangents]
        again = {n: is_in_backward(n) or ("partitioner_tag" not in n.meta and n > first) for n in known}
        if any(again.values()) and not all(again.values()):
            found |= again
    return found


def _is_step(c: Collective) -> bool:
    return c.op is Op.ALL_TO_ALL and c.wait is not None and c.group is not None and is_permute(c)


def _may_replace(kept: Collective, repeated: Collective, again: dict[Node, bool]) -> bool:
    """Return whether the readers of `repeated` may be in the region of `kept`.

    Two steps of forward must be in one checkpointed region. A step of backward is in none. It may read one of forward that is
    marked for recomputation: backward then runs that one again, which is what the user asked for. Gathers of one half are
    merged by merge_gathers.py, within a memory limit.
    """
    if repeated.node in again:
        return again[repeated.node] and not again[kept.node] and "recompute" not in repeated.node.meta
    if region_of(kept.node) == region_of(repeated.node):
        return True
    return is_in_backward(repeated.node) and not is_in_backward(kept.node) and "recompute" not in repeated.node.meta


def _replace(graph: Graph, repeated: Collective, kept: Collective) -> None:
    """Let the readers of `repeated` read `kept`. Erase it, and what nothing reads then."""
    assert repeated.wait is not None and kept.wait is not None
    repeated.wait.replace_all_uses_with(kept.wait)
    graph.erase_node(repeated.wait)
    graph.erase_node(repeated.node)
    _erase_unread(graph, repeated.input)
    for user in list(kept.wait.users):
        _spell_out(user)
    record_decision(kept.node, merged_count=sum(joint_decision(c.node).merged_count for c in (kept, repeated)))


def _erase_unread(graph: Graph, node: Node) -> None:
    """Erase `node`, and what only it reads, as far as elements only pass through."""
    todo = {node}
    while todo:
        node = max(todo)  # the last in graph order: what reads it was seen before
        todo.remove(node)
        # Another exchange keeps its wait: DCE would remove one without, on this rank only.
        if not node.users and node.target is not c10d.wait_tensor.default and _passes_elements_on(node):
            todo.update(node.all_input_nodes)
            graph.erase_node(node)


def _spell_out(node: Node) -> None:
    """Give a slice the end that it has, so that torch sees which ones are equal and saves one."""
    cut = read_cut(node) if node.target is aten.slice.Tensor else None
    if cut is not None and all(isinstance(n, int) for n in cut[1:]):
        node.args = cut


def _passes_elements_on(node: Node) -> bool:
    return node.op == "call_function" and is_elementwise(node) and not is_random(node) and not is_mutable(node)


class _Values:
    """Nodes by their values: equal are those with one op and equal arguments, from nodes that elements only pass through.

    A tensor that the graph writes to has no value here, at any time.
    """

    def __init__(self, graph: Graph, steps: set[Node]) -> None:
        self._steps = steps
        self._written = written_memory(graph)
        self._returned = {storage_node(i) for out in graph.find_nodes(op="output") for i in out.all_input_nodes}
        self._first: dict[Node, Node] = {}
        self._by_key: dict[tuple[object, ...], Node] = {}

    def first_equal(self, node: Node) -> Node:
        """Return the first node of the graph with the value of `node`. Call it for all nodes, in graph order."""
        is_value = node in self._steps or _passes_elements_on(node)
        if is_value and not any(storage_node(i) in self._written for i in node.all_input_nodes):
            self._first[node] = self._by_key.setdefault(self._key(node), node)
        else:
            self._first[node] = node
        return self._first[node]

    def is_returned(self, *results: Node) -> bool:
        """Return whether the graph returns one of `results` or a view of it: no other output may use its memory."""
        return any(storage_node(r) in self._returned for r in results)

    def _key(self, node: Node) -> tuple[object, ...]:
        cut = read_cut(node) if node.target is aten.slice.Tensor else None
        if cut is not None:
            source, *place = cut
            return (aten.slice.Tensor, self._first[source], *place)
        arguments = map_arg((node.args, node.kwargs), lambda i: self._first[i])
        return node.target, repr(arguments)  # the text tells 1 from 1.0 and True

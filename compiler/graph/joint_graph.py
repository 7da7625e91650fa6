"""The two halves of a joint graph: which nodes belong to backward, and which values backward recomputes."""

from __future__ import annotations

from collections.abc import Iterable

from torch.fx import Graph, Node

from ub_overlap import _torch_compat as compat


def needs_tangents(graph: Graph) -> set[Node]:
    """Return the nodes of a joint graph that only backward can compute."""
    backward: set[Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            if "tangents" in node.name:
                backward.add(node)
        elif any(i in backward for i in node.all_input_nodes):
            backward.add(node)
    return backward


def is_in_backward(node: Node) -> bool:
    """Return whether backward computes `node` in the traced program, with or without tangents."""
    return half_of(node) == "backward"


def half_of(node: Node) -> str:
    """Return "forward" or "backward": the half of a training step to which the trace ascribes `node`.

    The partitioner's tag says it in a joint graph of AOTAutograd, the mark of torch's autograd in others.
    """
    tag = node.meta.get("partitioner_tag")
    is_backward = node.meta.get(AUTOGRAD_BACKWARD) if tag is None else tag in ("is_backward", "must_be_in_backward")
    return "backward" if is_backward else "forward"


AUTOGRAD_BACKWARD = "autograd_backward"
"""Key of node.meta: the mark of torch's autograd in a trace."""
HALF = "ub_overlap_half"
"""Key of node.meta: set by `mark_halves`."""


def mark_halves(graph: Graph) -> None:
    """Mark all nodes behind the first of backward, in a graph of a whole step.

    Passes of the user insert copies of forward nodes there, to compute or gather again. They have no mark of autograd.
    """
    first, is_behind = first_of_backward(graph), False
    for node in graph.nodes:
        is_behind = is_behind or node == first
        if is_behind:
            node.meta[HALF] = "backward"


def first_of_backward(graph: Graph) -> Node | None:
    """Return the first node that autograd has marked, or in a graph without marks the first op that is named so; else None.

    make_fx alone marks nothing: nodes of backward in front of the first such op, as of the loss, are then not known.
    """
    calls = [n for n in graph.nodes if n.op == "call_function"]
    marked = next(filter(is_in_backward, calls), None)
    return marked if marked is not None else next((n for n in calls if "_backward" in str(n.target)), None)


RECOMPUTED = "ub_overlap_recomputed"
"""Key of node.meta: the region in which `mark_recomputed` marked the node."""
CHECKPOINT_KEYS = ("recompute", "ac_graph_id", RECOMPUTED)
"""Keys of node.meta that put a node into a checkpoint region. Without RECOMPUTED a copy would look as if the user had
checkpointed it."""
_REGION_KEYS = ("partitioner_tag", "recompute", "ac_graph_id", HALF)
_COPIED_KEYS = ("partitioner_tag", *CHECKPOINT_KEYS, HALF, AUTOGRAD_BACKWARD)
"""Passes of the user repeat nodes of forward in backward without autograd's mark: these are in its region too."""


def region_of(node: Node) -> tuple[object, ...]:
    """Return what ties `node` to one half of the joint graph, or to a checkpoint region."""
    return tuple(node.meta.get(key) for key in _REGION_KEYS)


def copy_region(source: Node, nodes: Iterable[Node]) -> None:
    """Put `nodes` where `source` is: in its half and its checkpoint region."""
    for node in nodes:
        for key in _COPIED_KEYS:
            node.meta.pop(key, None)
            if key in source.meta:
                node.meta[key] = source.meta[key]


def nodes_between(first: Node, last: Node) -> list[Node]:
    """Return the nodes of a graph behind `first` and in front of `last`, as those that were emitted between them."""
    found, node = list[Node](), first.next
    while node is not last:
        found.append(node)
        node = node.next
    return found


FIRST_REGION = 0
"""A checkpoint region for values that are cheap to recompute from their neighbors."""
LAST_REGION = 2**31
"""A checkpoint region after all of the user's. torch saves the values that a later region reads from an earlier one."""


def mark_recomputed(nodes: Iterable[Node], region: int) -> None:
    """Mark nodes of the forward half that backward recomputes instead of saving.

    `region`: their checkpoint region, unless the user's program puts them in one.
    """
    for node in nodes:
        node.meta["recompute"], node.meta[RECOMPUTED] = compat.CheckpointPolicy.MUST_RECOMPUTE, region
        node.meta.setdefault("ac_graph_id", region)


def drop_unread(graph: Graph) -> None:
    """Erase nodes of LAST_REGION that nothing reads in this half of a joint graph.

    torch's partitioner leaves every collective that forward could compute in forward as well, as a wait counts as an effect.
    """
    for node in reversed(graph.nodes):
        if node.meta.get(RECOMPUTED) == LAST_REGION and not node.users:
            graph.erase_node(node)

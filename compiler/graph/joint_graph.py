"""What a joint graph tells of its two halves, and what it is told."""

from __future__ import annotations

from collections.abc import Iterable

from torch.fx import Graph, Node

from ub_overlap import _torch_compat as compat


def needs_tangents(graph: Graph) -> set[Node]:
    """The nodes of a joint graph that only backward can compute."""
    out: set[Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            if "tangents" in node.name:
                out.add(node)
        elif any(i in out for i in node.all_input_nodes):
            out.add(node)
    return out


LAST_REGION = 2**31
"""Of checkpoint regions, one behind all of the user's: torch keeps what a later region computes again of an earlier one's."""
IN_BACKWARD = "ub_overlap_in_backward"
"""Key of node.meta of what `in_backward` marked."""


def in_backward(nodes: Iterable[Node]) -> None:
    """Marks nodes of the forward half: where backward needs their values it computes them, and keeps none."""
    for node in nodes:
        node.meta["recompute"], node.meta[IN_BACKWARD] = compat.must_recompute(), True
        node.meta.setdefault("ac_graph_id", LAST_REGION)


def drop_unread(graph: Graph) -> None:
    """Of a half of a joint graph, takes out what `in_backward` marked and nobody there reads: torch's partitioner leaves every
    collective that the forward could compute in the forward as well, as a wait counts as an effect."""
    for node in reversed(graph.nodes):
        if IN_BACKWARD in node.meta and not node.users:
            graph.erase_node(node)

"""What a joint graph tells of its two halves."""

from __future__ import annotations

from torch.fx import Graph, Node


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

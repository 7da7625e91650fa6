"""Erase graph nodes without readers."""

from __future__ import annotations

from collections.abc import Iterable

from torch.fx import Graph, Node


def erase_unread(graph: Graph, nodes: Iterable[Node]) -> list[Node]:
    """Erase those of `nodes` that nothing outside of them reads. Return the others."""
    left = sorted(set(nodes), reverse=True)
    while unread := [node for node in left if not node.users]:
        for node in unread:
            graph.erase_node(node)
        left = [node for node in left if node not in unread]
    return left

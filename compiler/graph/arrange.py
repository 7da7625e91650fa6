"""Put the nodes of a graph in another order."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

from torch.fx import Graph, Node

_PLACE = "ub_overlap_place"
"""Key of node.meta: the node's place in an order that is to be kept."""


def arrange(nodes: Sequence[Node]) -> None:
    """Put all nodes of a graph in this order."""
    first = next(iter(nodes[0].graph.nodes))
    if nodes[0] is not first:
        first.prepend(nodes[0])
    for before, node in pairwise(nodes):
        before.append(node)


Followers = Mapping[Node, Collection[Node]]


def sort_by_keys(graph: Graph, keys: Mapping[Node, Any], followers: Followers | None = None) -> list[Node]:
    """Return the nodes in the topological order that follows `keys`; equal keys in graph order.

    `followers`: nodes that come behind a node though they do not read it.
    """
    nodes, followers = list(graph.nodes), followers or {}
    index = {n: i for i, n in enumerate(nodes)}
    missing = {n: len(n.all_input_nodes) for n in nodes}
    for behind in followers.values():
        for node in behind:
            missing[node] += 1
    ready = [(keys[n], i) for n, i in index.items() if not missing[n]]
    heapq.heapify(ready)
    order: list[Node] = []
    while ready:
        _, i = heapq.heappop(ready)
        order.append(nodes[i])
        for user in (*nodes[i].users, *followers.get(nodes[i], ())):
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, (keys[user], index[user]))
    assert len(order) == len(nodes), "a cycle in the graph"
    return order


def note_places(graph: Graph) -> None:
    """Let `restore_places` find the present order again."""
    for place, node in enumerate(graph.nodes):
        node.meta[_PLACE] = place


def restore_places(graph: Graph) -> None:
    """Bring back the order that was noted, if one was. A node that is new since then follows its inputs."""
    if not any(_PLACE in node.meta for node in graph.nodes):
        return
    keys: dict[Node, int] = {}
    for node in graph.nodes:
        after_inputs = max((keys[i] for i in node.all_input_nodes), default=-1)
        keys[node] = node.meta.get(_PLACE, after_inputs)
    arrange(sort_by_keys(graph, keys))

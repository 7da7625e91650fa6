"""The order of a graph with split collectives, and the rewritten graph in that order.

Fused sites are at the place of their nodes, starts and finishes at the places that were chosen, and everything else keeps its
order. A lead moves in front with its start, a trail back with its finish.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.fx import Graph, Node

from ..graph.emitter import SITE
from ..match.window import Window
from .placement import Placed

Key = tuple[float, int, int]
"""(position, 0 for starts and finishes and 1 for the item there, number)."""


@dataclass(frozen=True, slots=True)
class GraphLayout:
    """`items`: the nodes of the graph before the rewrite, each fused site in a row. `entries`: the split sites by name."""

    items: tuple[Node, ...]
    entries: Mapping[str, tuple[Window, Placed]]


def apply_layout(graph: Graph, layout: GraphLayout, members: Mapping[str, Collection[Node]]) -> None:
    """Sort the rewritten graph. `members`: by site name the nodes that each site has replaced."""
    keys = _keys(graph, layout, members)
    order = _sort(graph, keys)
    placed = [keys[n] for n in order if n.meta.get(SITE) in layout.entries and _is_half(n)]
    assert placed == sorted(placed), "starts and finishes of split collectives are not in the order of the plan"
    first = next(iter(graph.nodes))
    if order[0] is not first:
        first.prepend(order[0])
    for before, node in pairwise(order):
        before.append(node)


def _is_half(node: Node) -> bool:
    return node.target in (
        torch.ops.ub_overlap.start_collective.default,
        torch.ops.ub_overlap.finish_collective.default,
    )


def _keys(graph: Graph, layout: GraphLayout, members: Mapping[str, Collection[Node]]) -> dict[Node, Key]:
    position = {n: i for i, n in enumerate(layout.items)}
    first_of = {name: min(position[m] for m in nodes) for name, nodes in members.items() if name not in layout.entries}
    keys: dict[Node, Key] = {}
    started: set[str] = set()
    emitted: list[Node] = []
    for n in graph.nodes:
        name = n.meta.get(SITE, "")
        if n.op == "placeholder":
            keys[n] = (-1, 0, 0)
        elif n in position:
            keys[n] = (position[n], 1, 0)
        elif name in layout.entries:
            _, p = layout.entries[name]
            keys[n] = (p.finish, 0, p.finish_number) if name in started else (p.start, 0, p.start_number)
            if n.target is torch.ops.ub_overlap.start_collective.default:
                started.add(name)
        elif name in first_of:
            keys[n] = (first_of[name], 1, 0)
            emitted.append(n)
        else:
            keys[n] = max([keys[i] for i in n.all_input_nodes if i in keys], default=(-1, 1, 0))
    for window, p in layout.entries.values():
        for n in window.lead:
            if n in keys:
                keys[n] = min(keys[n], (p.start, 0, p.start_number))
        for n in window.trail:
            if n in keys:
                keys[n] = max(keys[n], (p.finish, 0, p.finish_number))
    for n in reversed(emitted):  # an operand that two sites share is made for the first of them
        keys[n] = min([keys[n], *(keys[u] for u in n.users)])
    return keys


def _sort(graph: Graph, keys: Mapping[Node, Key]) -> list[Node]:
    """Return the nodes in the topological order that follows `keys`; equal keys in graph order."""
    nodes = list(graph.nodes)
    index = {n: i for i, n in enumerate(nodes)}
    missing = {n: len(n.all_input_nodes) for n in nodes}
    ready = [(keys[n], i) for n, i in index.items() if not missing[n]]
    heapq.heapify(ready)
    order: list[Node] = []
    while ready:
        _, i = heapq.heappop(ready)
        order.append(nodes[i])
        for user in nodes[i].users:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, (keys[user], index[user]))
    assert len(order) == len(nodes), "a cycle in the rewritten graph"
    return order

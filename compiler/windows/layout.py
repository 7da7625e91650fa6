"""The order of a graph with split collectives, and the rewritten graph in that order.

Fused sites are at the place of their nodes, starts, finishes and releases at the places that were chosen, and everything else
keeps its order. A lead moves in front with its start, a trail back with its finish. A release follows all that reads the
memory which it gives back.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from ub_overlap.runtime.schedule.steps import Part

from ..graph.arrange import arrange, sort_by_keys
from ..graph.aten import alias_base, is_mutable, tensor_of
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
    inner: Collection[str] = ()
    """The split sites in the middle of the graph, by name: independent nodes run between their start and finish."""


def apply_layout(graph: Graph, layout: GraphLayout, members: Mapping[str, Collection[Node]]) -> None:
    """Sort the rewritten graph. `members`: by site name the nodes that each site has replaced."""
    keys = _keys(graph, layout, members)
    order = sort_by_keys(graph, keys, _releases(list(graph.nodes)))
    placed = [keys[n] for n in order if n.meta.get(SITE) in layout.entries and _part(n) is not None]
    assert placed == sorted(placed), "the ops of split collectives are not in the order of the plan"
    arrange(order)
    finishes = {n for n in order if n.meta.get(SITE) in layout.inner and _part(n) is Part.FINISH}
    if finishes or any(_part(n) is Part.RELEASE for n in order):
        _number_stretches(order, finishes)


def _number_stretches(order: Sequence[Node], finishes: Collection[Node]) -> None:
    """Number the stretches between writes again, and those between `finishes`. Inductor merges no nodes of two stretches.

    So it does not merge a matmul in front of a release with the sum behind it. Nor does it merge a matmul that hides a split
    collective with a sum that reads the result: it would then run behind the finish. It numbered this graph before the rewrite.
    """
    stretch = 0
    for node in order:
        stretch += is_mutable(node) or node in finishes or node.kwargs.get("out") is not None
        node.meta["mutation_region_id"] = stretch


def _part(node: Node) -> Part | None:
    """Return the part of a split collective that `node` issues; None for other nodes."""
    ops = torch.ops.ub_overlap
    parts: dict[Any, Part] = {
        ops.start_collective.default: Part.START,
        ops.finish_collective.default: Part.FINISH,
        ops.start_coalesced.default: Part.START,
        ops.finish_coalesced.default: Part.FINISH,
        ops.start_all_to_all.default: Part.START,
        ops.finish_all_to_all.default: Part.FINISH,
        ops.release_collective.default: Part.RELEASE,
        ops.release_coalesced.default: Part.RELEASE,
    }
    return parts.get(node.target)


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
        elif name in layout.entries and (_part(n) is not None or tensor_of(n) is not None):  # sizes have no place of their own
            _, p = layout.entries[name]
            keys[n] = (p.finish, 0, p.finish_number) if name in started else (p.start, 0, p.start_number)
            if _part(n) is Part.START:
                started.add(name)
            elif _part(n) is Part.RELEASE:
                assert p.release is not None, f"{name} is released without a place"
                keys[n] = (p.release, 0, p.release_number)
        elif name in first_of:
            keys[n] = (first_of[name], 1, 0)
            emitted.append(n)
        else:
            keys[n] = max([keys[i] for i in n.all_input_nodes if i in keys], default=(-1, 1, 0))
    for window, p in [(each, p) for entry, p in layout.entries.values() for each in entry.each]:
        for n in window.lead:
            if n in keys:
                keys[n] = min(keys[n], (p.start, 0, p.start_number))
        for n in window.trail:
            if n in keys:
                keys[n] = max(keys[n], (p.finish, 0, p.finish_number))
    for n in reversed(emitted):  # an operand that two sites share is made for the first of them
        keys[n] = min([keys[n], *(keys[u] for u in n.users)])
    return keys


def _releases(nodes: Sequence[Node]) -> dict[Node, list[Node]]:
    """Return for each node the releases that follow it: of the memory that it reads, or is a view of."""
    found: dict[Node, list[Node]] = {}
    for release in (n for n in nodes if _part(n) is Part.RELEASE):
        todo, seen = list(release.all_input_nodes), {release}
        while todo:
            for user in todo.pop().users:
                if user in seen:
                    continue
                seen.add(user)
                found.setdefault(user, []).append(release)
                if alias_base(user) is not None:
                    todo.append(user)
    return found

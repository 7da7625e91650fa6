"""Slots of collectives that are placed by order alone: those of rings.

torch unrolls a ring with the rank as a constant, so the graphs of ranks differ: one attends to a half of the queries, one to
nothing, one reads another shard. What ranks must share, the order of starts and the slots, thus rests on nothing but the order
of the collectives. Each starts at its traced place, which is in front of the attention that hides it. Number n of them in a
group takes slot n modulo a constant, and has finished before number n + constant starts. Where a rank finishes in between is
its own business.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from torch.fx import Graph, Node

from ..match import Candidate
from ..match.collectives import Op
from ..match.window import Window, WindowFinder
from .placement import Transfer

GATHERS, EXCHANGES = 2, 4
"""Slots of one group: where it only gathers, one transfer is in flight at a time; else tensors and gradients travel at once."""


def is_in_ring(window: Window, parameters: Collection[Node] | None) -> bool:
    """Return whether other ranks may use another part of the result. `parameters`: as in `Window.is_at_the_edge`."""
    is_exchange = window.collective.op is Op.ALL_TO_ALL
    return window.may_differ_by_rank and (is_exchange or not window.is_at_the_edge(parameters))


def has_ring(graph: Graph, candidates: Iterable[Candidate], parameters: Collection[Node] | None) -> bool:
    """Return whether the graph has a collective of a ring, split or not: other ranks may have another graph then."""
    known = [c for c in (one.collective for one in candidates) if c.op in (Op.ALL_GATHER, Op.ALL_TO_ALL) and c.wait is not None]
    if not known:
        return False
    finder = WindowFinder(graph)
    return any(is_in_ring(finder.find(c), parameters) for c in known)


def fix_slots(transfers: list[Transfer], by_order: Mapping[int, Op | None]) -> None:
    """Give the transfers of these numbers their slots and starts, in place. `by_order`: their collectives.

    An input may be ready at other places on other ranks, so no start moves in front of its traced place.
    """
    groups: dict[str, list[int]] = {}
    for k in sorted(by_order, key=lambda k: transfers[k].plain_at):
        groups.setdefault(transfers[k].group, []).append(k)
    for numbers in groups.values():
        slots = GATHERS if all(by_order[k] is Op.ALL_GATHER for k in numbers) else EXCHANGES
        for n, k in enumerate(numbers):
            later = [transfers[other].plain_at for other in numbers[n + slots : n + slots + 1]]
            t = transfers[k]
            transfers[k] = replace(t, slot=n % slots, earliest=t.plain_at, latest=min([t.latest, *later]))

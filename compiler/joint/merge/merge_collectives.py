"""Merge all collectives of a joint graph that can be merged."""

from __future__ import annotations

from torch.fx import Graph

from ...match.collectives import Collective, Op, find_collectives
from .limits import MergeLimits
from .merge_exchanges import has_equal_exchanges, merge_exchanges
from .merge_gathers import has_equal_gathers, merge_gathers
from .merge_reductions import has_sums, merge_reductions


def may_merge(graph: Graph) -> bool:
    """Return whether the graph has collectives that look as if they can be merged. It takes a fraction of the pass's time."""
    gathers, exchanges, reductions = _by_kind(graph)
    return has_equal_gathers(gathers) or has_equal_exchanges(graph, [*gathers, *exchanges]) or has_sums(graph, reductions)


def merge_collectives(graph: Graph, growth: int | None = None) -> int:
    """Merge in place. Return the number of removed collectives.

    `growth`: bytes by which merging gathers and reductions may raise the memory peak; None for the limit of bulk sites.
    """
    gathers, exchanges, _ = _by_kind(graph)
    count = merge_exchanges(graph, [*gathers, *exchanges])
    limits = MergeLimits(graph, growth)
    count += merge_gathers(graph, _by_kind(graph)[0], limits)
    return count + merge_reductions(graph, _by_kind(graph)[2], limits)


def _by_kind(graph: Graph) -> tuple[list[Collective], list[Collective], list[Collective]]:
    """Return the gathers, the exchanges and the reductions that have one wait and a known group, as the graph is now."""
    known = [c for c in find_collectives(graph) if c.op is not None and c.wait is not None and c.group is not None]
    gathers = [c for c in known if c.op is Op.ALL_GATHER]
    exchanges = [c for c in known if c.op is Op.ALL_TO_ALL]
    return gathers, exchanges, [c for c in known if c.op in (Op.ALL_REDUCE, Op.REDUCE_SCATTER)]

"""Merge all collectives of a joint graph that can be merged."""

from __future__ import annotations

from torch.fx import Graph

from ...match.collectives import Op, find_collectives
from .limits import MergeLimits
from .merge_gathers import merge_gathers
from .merge_reductions import merge_reductions


def merge_collectives(graph: Graph, growth: int | None = None) -> int:
    """Merge in place. Return the number of removed collectives.

    `growth`: bytes by which merging may raise the memory peak; None for the limit of bulk sites.
    """
    collectives = [c for c in find_collectives(graph) if c.op is not None and c.wait is not None and c.group is not None]
    gathers = [c for c in collectives if c.op is Op.ALL_GATHER]
    reductions = [c for c in collectives if c.op is not Op.ALL_GATHER]
    if len(gathers) < 2 and len(reductions) < 2:
        return 0
    limits = MergeLimits(graph, growth)
    return merge_gathers(graph, gathers, limits) + merge_reductions(graph, reductions, limits)

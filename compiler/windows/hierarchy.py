"""Hierarchical collectives: a group with several ranks on each of several hosts as two split collectives, one behind the other.

    all_gather       shard of a rank -> gathered across hosts -> gathered within the host -> blocks in the order of ranks
    reduce_scatter   blocks in the order of ranks within the host -> summed within the host -> summed across hosts -> shard

c10d carries the half across hosts, our copies the half within one. Both send what one collective over the whole group sends at
least: no byte crosses the network twice. Each half has a window, a slot and a link of its own, so the halves of several
collectives overlap. Sums differ from those of one collective by their order.
"""

from __future__ import annotations

from dataclasses import dataclass

from ub_overlap.runtime.session.host_layout import find_layout

from ..cost.site_shape import SIZES, SiteShape
from ..cost.split_time import SplitTimes, hierarchical_times
from ..graph.aten import shape_of
from ..match.collectives import Collective, Op
from ..match.site import Half
from ..select.profitability import SiteCosts
from .placement import NETWORK, PORT


@dataclass(frozen=True, slots=True)
class HalfCandidate:
    """One half of a hierarchical collective that may be placed."""

    half: Half
    times: SplitTimes
    landing_bytes: int
    held_bytes: int

    @property
    def link(self) -> str:
        return NETWORK if self.half.is_across else PORT

    @property
    def transport(self) -> str:
        return "c10d" if self.half.is_across else ""


def find_halves(
    c: Collective, shape: SiteShape, chunks: int, costs: SiteCosts, held_bytes: int
) -> tuple[HalfCandidate, HalfCandidate] | None:
    """Return the halves of `c` in the order in which they run. None where it has none, or the options want none.

    `held_bytes`: of its input.
    """
    if c.op not in (Op.ALL_GATHER, Op.REDUCE_SCATTER) or c.group is None or costs.policy.hierarchical == "off":
        return None
    if not all(isinstance(size, int) for size in shape_of(c.input)):  # blocks are put in order by sizes
        return None
    profile = costs.policy.profile(c.ranks, c.node.meta["val"].device.type)
    layout = find_layout(c.group)
    if layout is None or (profile.network is None and costs.policy.hierarchical != "force"):
        return None
    first, second = hierarchical_times(shape, chunks, profile)
    whole = shape.rows * shape.cols * SIZES[shape.dtype]
    part = whole // layout.ranks_per_host
    across, within = Half(layout.across, layout.hosts, True), Half(layout.within, layout.ranks_per_host, False)
    if c.op is Op.ALL_GATHER:
        return HalfCandidate(across, first, part, held_bytes), HalfCandidate(within, second, whole, part)
    return HalfCandidate(within, first, whole, whole), HalfCandidate(across, second, part // layout.hosts, part)


def shortest_us(times: tuple[SplitTimes, ...], hidden_us: float) -> float:
    """Return the least time that the halves take from a graph in whose window `hidden_us` of other work run."""
    transfers = sum(t.transfer_us for t in times)
    return sum(t.shortest_us + t.slowed_us for t in times) + max(0.0, transfers - hidden_us)

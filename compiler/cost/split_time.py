"""(shape, profile) -> the times of a collective that is split into start and finish.

ours      the steps of bulk, cut in two; the transfer takes the port of the link. A zero-copy gather copies its own shard
          only, in the start, and releases its result
by c10d   for a group across hosts: start launches the plain collective, which takes the network; finish waits for it
both      a group with several ranks on each of several hosts: a gather across hosts is sent on within each, a reduction within
          each host across them. Blocks are put in the order of ranks in between, which takes one copy

A coalesced collective has its fixed steps once. An all_to_all of ours has times of its own (all_to_all_time.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from ..plan.strategy import Mode, Strategy
from .all_to_all_time import all_to_all_us
from .curve import at
from .predict import collective_us, item_costs, why_assumed
from .profile import Profile
from .program import CostItem, programs
from .site_shape import SiteShape


@dataclass(frozen=True, slots=True)
class SplitTimes:
    """Microseconds. `transfer_us`: of the link, while other nodes run. An all_reduce of ours sends its sums in `finish_us`."""

    plain_us: float
    start_us: float
    transfer_us: float
    finish_us: float
    matmul_slowdown: float
    """Slowdown of matmuls during the transfer."""
    transfer_slowdown: float
    """Slowdown of the transfer during matmuls."""
    release_us: float = 0.0
    assumed: str = ""
    """Why `plain_us` is assumed; "" where it was measured."""

    @property
    def shortest_us(self) -> float:
        """The time that it takes from the graph where all of the transfer is hidden."""
        return self.start_us + self.finish_us + self.release_us

    @property
    def slowed_us(self) -> float:
        """The time by which the transfer slows matmuls down."""
        return self.matmul_slowdown * self.transfer_us


_OWN_SHARD = CostItem("copy", 1.0)
_FIXED = frozenset({"begin", "end", "flag", "signal", "wait"})
"""Steps that a collective of several tensors has once."""


@lru_cache(maxsize=1024)
def split_times(shape: SiteShape, chunks: int, profile: Profile, zero_copy: bool = False) -> SplitTimes:
    """Predict the ops of a collective without matmuls. `zero_copy`: of a gather."""
    steps, plain, assumed = profile.steps, collective_us(shape, profile), why_assumed(shape, profile)
    if shape.hosts > 1:
        network = profile.network
        slowdowns = (network.matmul_slowdown, network.transfer_slowdown) if network else (profile.matmul_slowdown, 0.0)
        return SplitTimes(plain + steps.gap_us, steps.begin_us, plain, steps.wait_us, *slowdowns, assumed=assumed)
    if shape.collective == "all_to_all":
        pushes_us, finish_us = all_to_all_us(shape, profile)
        slowdowns = profile.matmul_slowdown, profile.push_slowdown
        return SplitTimes(plain + steps.gap_us, steps.begin_us, pushes_us, finish_us, *slowdowns, assumed=assumed)
    return _own_times((shape,), chunks, profile, zero_copy)


@lru_cache(maxsize=1024)
def coalesced_times(shapes: tuple[SiteShape, ...], chunks: int, profile: Profile, zero_copy: bool = False) -> SplitTimes:
    """Predict a split collective of several tensors: the fixed steps of one; the copies, pushes and sums of each."""
    if len(shapes) == 1:
        return split_times(shapes[0], chunks, profile, zero_copy)
    return _own_times(shapes, chunks, profile, zero_copy)


def _own_times(shapes: tuple[SiteShape, ...], chunks: int, profile: Profile, zero_copy: bool) -> SplitTimes:
    """Predict the ops of ours for a collective of one tensor or more within a host."""
    steps, plain = profile.steps, sum(collective_us(shape, profile) + profile.steps.gap_us for shape in shapes)
    costs = [item_costs(shape, profile) for shape in shapes]

    def cost(work: CostItem) -> float:
        return costs[0](work) if work.what in _FIXED else sum(each(work) for each in costs)

    start, transfer, finish, release, sums_follow = steps.begin_us, 0.0, 0.0, 0.0, False
    if zero_copy:  # the copy queue copies the own shard, which costs concurrent matmuls as much time as it takes
        start, release = start + cost(_OWN_SHARD), steps.end_us
    for item in programs(shapes[0].key(Strategy(Mode.BULK, chunks)))[0]:
        us = cost(item.work)
        sums_follow = sums_follow or item.work.of_sum
        if item.copies and not sums_follow:
            transfer += us
        elif item.work != CostItem("begin") and not (zero_copy and item.work.what == "copy"):
            finish += us
    slowdowns = profile.matmul_slowdown, profile.push_slowdown
    return SplitTimes(plain, start, transfer, finish, *slowdowns, release, why_assumed(shapes[0], profile))


@lru_cache(maxsize=1024)
def hierarchical_times(shape: SiteShape, chunks: int, profile: Profile) -> tuple[SplitTimes, SplitTimes]:
    """Predict the two halves of a hierarchical gather or reduce_scatter over `shape.hosts` hosts, in the order of their run.

    The plain collective counts with the half that takes the network.
    """
    each = shape.ranks // shape.hosts
    across = split_times(replace(shape, ranks=shape.hosts, rows=shape.rows // each), 0, profile)
    within = split_times(replace(shape, ranks=each, hosts=1), chunks, profile)
    plain_us = collective_us(shape, profile) + profile.steps.gap_us
    across, within = replace(across, plain_us=plain_us), replace(within, plain_us=0.0)
    reorder_us = at(profile.copy, shape.whole_bytes)
    if shape.collective == "all_gather":
        return across, replace(within, finish_us=within.finish_us + reorder_us)
    return replace(within, start_us=within.start_us + reorder_us), across

"""(shape, profile) -> the times of a collective that is split into start and finish.

ours      the steps of bulk, cut in two; the transfer takes the port of the link
by c10d   for a group across hosts: start launches the plain collective, which takes the network; finish waits for it
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ..plan.strategy import Mode, Strategy
from .predict import collective_us, item_costs
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

    @property
    def shortest_us(self) -> float:
        """The time that it takes from the graph where all of the transfer is hidden."""
        return self.start_us + self.finish_us

    @property
    def slowed_us(self) -> float:
        """The time by which the transfer slows matmuls down."""
        return self.matmul_slowdown * self.transfer_us


@lru_cache(maxsize=1024)
def split_times(shape: SiteShape, chunks: int, profile: Profile) -> SplitTimes:
    """Predict the halves of a collective without matmuls."""
    steps, plain = profile.steps, collective_us(shape, profile)
    if shape.hosts > 1:
        slowdown = profile.network.matmul_slowdown if profile.network else profile.matmul_slowdown
        return SplitTimes(plain + steps.gap_us, steps.begin_us, plain, steps.wait_us, slowdown, 0.0)
    program = programs(shape.key(Strategy(Mode.BULK, chunks)))[0]
    cost, sums_follow = item_costs(shape, profile), False
    transfer, finish = 0.0, 0.0
    for item in program:
        us = cost(item.work)
        sums_follow = sums_follow or item.work.of_sum
        if item.copies and not sums_follow:
            transfer += us
        elif item.work != CostItem("begin"):
            finish += us
    return SplitTimes(plain + steps.gap_us, steps.begin_us, transfer, finish, profile.matmul_slowdown, profile.push_slowdown)

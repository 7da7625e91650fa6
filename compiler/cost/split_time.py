"""(shape, profile) -> the times of a collective that is split into start and finish. Its steps are those of bulk."""

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
    """Microseconds. `transfer_us`: of the port, while other nodes run. An all_reduce sends its sums in `finish_us`."""

    plain_us: float
    start_us: float
    transfer_us: float
    finish_us: float

    @property
    def shortest_us(self) -> float:
        """The time that it takes from the graph where all of the transfer is hidden."""
        return self.start_us + self.finish_us


@lru_cache(maxsize=1024)
def split_times(shape: SiteShape, chunks: int, profile: Profile) -> SplitTimes:
    """Predict the halves of a collective without matmuls."""
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
    return SplitTimes(collective_us(shape, profile) + profile.steps.gap_us, profile.steps.begin_us, transfer, finish)

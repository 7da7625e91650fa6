"""The checker refuses broken schedules: every harmful change of one step, on one rank, for every kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from ub_overlap.runtime.schedule import Key, Schedule, ScheduleError, build_all, check_sequence
from ub_overlap.runtime.schedule.interpret import Machine, SimulatedCall
from ub_overlap.runtime.schedule.steps import Wait

from .mutations import Broken, any_order, harmful
from .samples import keys

TIERS = {(1, 0): "check", (2, 4): "check", (3, 0): "test", (4, 2): "full"}
"""(ranks, chunks) of the keys. More ranks cost more time, and find what fewer do."""
SAMPLES = [
    pytest.param(key, marks=pytest.mark.tier(tier), id=str(key)) for sizes, tier in TIERS.items() for key in keys(*sizes)
]


def accepted(schedules: tuple[Schedule, ...]) -> bool:
    """Return whether three calls of one slot are proven. No call between them helps to order them."""
    distance = schedules[0].key.slot_distance
    try:
        check_sequence([schedules] * 3, epochs=[1, 1 + distance, 1 + 2 * distance])
    except ScheduleError:
        return False
    return True


def broken_groups(key: Key, mutate: Callable[[Schedule], Iterator[Broken]]) -> list[tuple[str, tuple[Schedule, ...]]]:
    good = build_all(key)
    at = key.ranks // 2
    return [(name, (*good[:at], schedule, *good[at + 1 :])) for name, schedule in mutate(good[at])]


@pytest.mark.parametrize("key", SAMPLES)
def test_harmful_changes_are_refused(key: Key) -> None:
    assert accepted(build_all(key))
    groups = broken_groups(key, harmful)
    assert len(groups) > 3
    missed = [name for name, schedules in groups if accepted(schedules)]
    if key.zero_copy:  # nothing is read before the last flag, and pushes land in order: flags of earlier pieces may be wrong
        last = max((step.flag.index for step in build_all(key)[0].steps if isinstance(step, Wait)), default=0)
        missed = [name for name in missed if not any("READY: 0>, rank=" in name and f"index={i})" in name for i in range(last))]
    assert missed == []


@pytest.mark.parametrize("key", SAMPLES)
def test_what_is_accepted_computes_the_right_rows(key: Key) -> None:
    kept = [(name, schedules) for name, schedules in broken_groups(key, any_order) if accepted(schedules)]
    for name, schedules in kept:
        site = SimulatedCall(schedules, tuple(range(key.ranks)), 1, tuple(2 + rank for rank in range(key.ranks)))
        for seed in range(4):
            outcome = Machine([site] * 3, seed).run()
            assert outcome.is_clean, (name, outcome)

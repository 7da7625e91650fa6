"""The replay of recorded steps accepts runs in order and refuses steps that ran too early."""

from __future__ import annotations

import pytest

from tests.gpu.replay import Record, Violation, replay
from ub_overlap.runtime.schedule import Schedule
from ub_overlap.runtime.schedule.builders import build_all
from ub_overlap.runtime.schedule.happens_before import Call, HappensBefore
from ub_overlap.runtime.schedule.steps import Compute, Copy, Finish, Key, Reduce, Signal, Wait

KINDS = {Copy: "copy", Signal: "signal", Wait: "wait", Compute: "matmul", Reduce: "reduce", Finish: "finish"}
KEYS = [
    Key("all_gather_matmul", 3, 6, contracts=(False, True), keep=True),
    Key("matmul_reduce_scatter", 3, 0, terms=1),
    Key("matmul_all_reduce", 2, 4, terms=1),
    Key("bulk_all_gather", 4, 0, independent=2),
]


def timed(schedules: tuple[Schedule, ...]) -> list[list[Record]]:
    """Return records of a run in which steps run one at a time."""
    order = HappensBefore([Call(schedules, tuple(range(len(schedules))), 1)], 2)
    records: list[list[Record]] = [[] for _ in schedules]
    for i, node in enumerate(order.sequence):
        begin = 1_000_000 * (i + 1)
        row = (node.place, node.step.queue.name, KINDS[type(node.step)], begin, begin + 900_000, 0)
        records[node.rank].append(row)
    return records


def shifted(records: list[list[Record]], rank: int, by: int) -> list[list[Record]]:
    """Return the records with one rank's clock ahead by `by` ns."""
    moved = [(s, q, k, begin + by, end + by, size) for s, q, k, begin, end, size in records[rank]]
    return [moved if r == rank else of for r, of in enumerate(records)]


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.kind)
def test_a_run_in_order_is_accepted(key: Key) -> None:
    schedules = build_all(key)
    records = timed(schedules)
    done = replay(schedules, records, one_clock=True)
    assert done.edges > 10
    assert done.pairs > 0
    assert any(replay(schedules, shifted(records, 1, 10**12), one_clock=False).offsets_ns)


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.kind)
def test_another_clock_is_told_from_one(key: Key) -> None:
    schedules = build_all(key)
    with pytest.raises(Violation):
        replay(schedules, shifted(timed(schedules), 1, 10**12), one_clock=True)


@pytest.mark.parametrize("one_clock", [True, False])
@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.kind)
def test_every_step_that_ran_too_early_is_seen(key: Key, one_clock: bool) -> None:
    """A move of any waiting step to the front is detected, also with unequal clocks."""
    schedules = build_all(key)
    records, order = timed(schedules), HappensBefore([Call(schedules, tuple(range(key.ranks)), 1)], 2)
    tried = 0
    for node in order.nodes:
        free = isinstance(node.step, Wait) and node.step.back
        if not any(order.nodes[i].rank == node.rank for i in node.before) or free:
            continue
        at = next(i for i, r in enumerate(records[node.rank]) if r[0] == node.place)
        row = records[node.rank][at]
        early = [list(of) for of in records]
        early[node.rank][at] = (*row[:3], 1, 2, row[5])
        with pytest.raises(Violation):
            replay(schedules, early, one_clock)
        tried += 1
    assert tried > 10


def test_missing_times_are_refused() -> None:
    schedules = build_all(KEYS[1])
    records = timed(schedules)
    with pytest.raises(Violation, match="recorded"):
        replay(schedules, [records[0][:-1], *records[1:]], True)
    zero = [(*records[0][0][:3], 0, 0, 0), *records[0][1:]]
    with pytest.raises(Violation, match="no times"):
        replay(schedules, [zero, *records[1:]], True)

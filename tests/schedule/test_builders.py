"""Builders: all schedules are proven, and their step order allows overlap."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction

import pytest

from tests.harness.tiers import full_but
from ub_overlap.runtime.schedule import Key, Schedule, ScheduleError, build, build_all, check, check_reuse, check_sequence
from ub_overlap.runtime.schedule.builders.schedule_writer import runs, split
from ub_overlap.runtime.schedule.steps import (
    Buf,
    Compute,
    Copy,
    Finish,
    FlagKind,
    Queue,
    Reduce,
    Region,
    Return,
    Signal,
    Step,
    Wait,
)

from .samples import chunk_counts, keys


def of(schedule: Schedule, kind: type[Step], queue: Queue | None = None) -> list[Step]:
    return [step for step in schedule.steps if isinstance(step, kind) and queue in (None, step.queue)]


@pytest.mark.parametrize("ranks", full_but(range(1, 5), range(1, 9)))
def test_every_key_is_proven(ranks: int) -> None:
    for chunks in chunk_counts(ranks):
        for key in keys(ranks, chunks):
            if chunks <= 2 * ranks:
                check_reuse(key, key)
            else:  # more pieces do not change how calls interact, but are the slowest to prove
                check(build_all(key))


@pytest.mark.parametrize("ranks", full_but([1, 2], [1, 2, 5]))
def test_every_key_is_proven_in_a_row(ranks: int) -> None:
    for chunks in chunk_counts(ranks):
        for key in keys(ranks, chunks):
            check_sequence([build_all(key)] * 4)


def test_gather_pushes_down_the_ring_and_consumes_up_the_ring() -> None:
    schedule = build(Key("all_gather_matmul", 4, 8, contracts=(False,)), 1)
    pushes = of(schedule, Copy, Queue.COPY)
    assert [(push.dst.rank, push.src.lo) for push in pushes] == [(d, Fraction(i, 2)) for d in (0, 3, 2) for i in (0, 1)]
    assert {(push.src.rank, push.src.shard) for push in pushes} == {(1, 1)}
    matmuls = of(schedule, Compute)
    assert [matmul.reads[0].buf for matmul in matmuls] == [Buf.INPUT] + 6 * [Buf.LANDING]
    assert [matmul.reads[0].shard for matmul in matmuls] == [1, 2, 2, 3, 3, 0, 0]


def test_gather_starts_computing_before_any_wait_on_compute() -> None:
    for chunks in (0, 2, 3, 8):
        for contracts in ((True,), (True, False)):
            schedule = build(Key("all_gather_matmul", 4, chunks, contracts=contracts), 2)
            assert isinstance(next(s for s in schedule.steps if s.queue is Queue.COMPUTE), Compute)


@pytest.mark.parametrize(
    ("chunks", "read"),
    [
        (1, [[0, 1, 2, 3]]),  # nothing is pipelined
        (2, [[2], [3], [0, 1]]),  # own, then all others at once: two runs, as shard 2 is in another buffer
        (3, [[2], [3], [0], [1]]),  # batches (3, 0) and (1): the ring wraps inside the first
        (4, [[2], [3], [0], [1]]),
    ],
)
def test_gather_takes_neighbouring_shards_together(chunks: int, read: list[list[int]]) -> None:
    schedule = build(Key("all_gather_matmul", 4, chunks, contracts=(False,)), 2)
    assert [[region.shard for region in matmul.reads] for matmul in of(schedule, Compute)] == read


def test_contractions_alone_accumulate_and_are_finished_once() -> None:
    schedule = build(Key("all_gather_matmul", 3, 0, contracts=(True, True)), 0)
    contraction = [step for step in of(schedule, Compute) if step.index == 0]
    assert [step.accumulate for step in contraction] == [False, True, True]
    assert all(step.writes == (Region(Buf.RESULT, 0, 0),) for step in contraction)
    assert [step.index for step in of(schedule, Finish)] == [0, 1]


def test_contractions_beside_others_come_last_and_whole() -> None:
    schedule = build(Key("all_gather_matmul", 3, 6, contracts=(True, False)), 1)
    *others, last = of(schedule, Compute)
    assert (last.index, last.accumulate, [step.index for step in others]) == (0, False, 5 * [1])
    assert [(region.buf, region.shard) for region in last.reads] == [(Buf.LANDING, shard) for shard in range(3)]
    assert not of(schedule, Finish)


def test_a_sum_of_several_matmuls_must_be_finished() -> None:
    key = Key("all_gather_matmul", 2, 0, contracts=(True,))
    schedules = [
        Schedule(key, rank, tuple(step for step in build(key, rank).steps if not isinstance(step, Finish))) for rank in range(2)
    ]
    with pytest.raises(ScheduleError, match="never rounded"):
        check(schedules)


@pytest.mark.parametrize("kind", ["matmul_reduce_scatter", "matmul_all_reduce"])
def test_scatter_computes_up_the_ring_with_its_own_shard_last(kind: str) -> None:
    schedule = build(Key(kind, 4, 8, terms=1), 2)
    assert [step.writes[0].shard for step in of(schedule, Compute)] == [3, 3, 0, 0, 1, 1, 2]
    pushes = [step for step in of(schedule, Copy) if step.dst.buf is Buf.LANDING]
    assert [(push.src.shard, push.dst.rank, push.dst.shard) for push in pushes[::2]] == [(3, 3, 2), (0, 0, 2), (1, 1, 2)]
    made = {step.record for step in of(schedule, Compute)} - {None}
    assert [push.after for push in pushes] == [(event,) for event in sorted(made)]


def test_scatter_aggregates_matmuls_but_not_pushes() -> None:
    schedule = build(Key("matmul_reduce_scatter", 8, 2, terms=1), 2)
    assert [[w.shard for w in step.writes] for step in of(schedule, Compute)] == [[3, 4, 5, 6], [7], [0, 1, 2]]
    assert [step.dst.rank for step in of(schedule, Copy)] == [3, 4, 5, 6, 7, 0, 1]


@pytest.mark.parametrize("kind", ["matmul_reduce_scatter", "matmul_all_reduce"])
def test_stripes_are_made_of_all_shards_and_pushed_at_once(kind: str) -> None:
    schedule = build(Key(kind, 4, 3, terms=1, striped=True), 1)
    matmuls = of(schedule, Compute)
    assert [[(w.shard, w.lo) for w in step.writes] for step in matmuls] == [
        [(shard, Fraction(i, 3)) for shard in range(4)] for i in range(3)
    ]
    pushes = [step for step in of(schedule, Copy) if step.dst.buf is Buf.LANDING]
    assert [(push.dst.rank, push.src.lo) for push in pushes] == [(d, Fraction(i, 3)) for i in range(3) for d in (2, 3, 0)]
    assert [push.after for push in pushes] == [(step.record,) if i == 0 else () for step in matmuls for i in range(3)]


@pytest.mark.parametrize("kind", ["matmul_reduce_scatter", "matmul_all_reduce"])
def test_direct_stores_every_shard_at_its_owner_by_one_matmul(kind: str) -> None:
    schedule = build(Key(kind, 4, terms=1, direct=True), 2)
    (matmul,) = of(schedule, Compute)
    assert matmul.writes == tuple(Region(Buf.LANDING, owner, 2) for owner in (3, 0, 1, 2))  # the own shard is last
    told = [step for step in of(schedule, Signal) if step.flag.kind is FlagKind.READY]
    free = [step for step in of(schedule, Wait) if step.flag.kind is FlagKind.DONE]
    assert {step.flag.rank for step in told} == {step.flag.source for step in free} == {0, 1, 3}
    assert schedule.steps[:7] == (*free, matmul, *told)
    assert all(step.queue is Queue.COMPUTE for step in (*free, matmul, *told))
    assert not [step for step in of(schedule, Copy) if step.dst.buf is Buf.LANDING]
    if kind == "matmul_reduce_scatter":
        assert not [step for step in schedule.steps if step.queue is Queue.COPY]


def test_direct_sums_what_landed() -> None:
    for rank in range(3):
        (step,) = of(build(Key("matmul_all_reduce", 3, terms=1, direct=True), rank), Reduce)
        assert step.srcs == tuple(Region(Buf.LANDING, rank, source) for source in range(3))


def test_sums_are_in_rank_order_on_every_rank() -> None:
    for rank in range(3):
        for step in of(build(Key("matmul_all_reduce", 3, 6, terms=1), rank), Reduce):
            assert [src.shard for src in step.srcs] == [0, 1, 2]
            assert [src.buf is Buf.PARTIAL for src in step.srcs] == [q == rank for q in range(3)]


@pytest.mark.parametrize("kind", ["bulk_all_gather", "bulk_reduce_scatter", "bulk_all_reduce"])
def test_bulk_issues_its_pushes_before_its_matmuls(kind: str) -> None:
    steps = build(Key(kind, 4, 8, independent=2), 3).steps
    first_matmul = next(i for i, step in enumerate(steps) if isinstance(step, Compute))
    pushed = [step for step in steps[:first_matmul] if isinstance(step, Copy)]
    assert len(pushed) == 3 * 2
    assert all(step.queue is Queue.COPY for step in steps[:first_matmul])
    assert not [step for step in steps[:first_matmul] if isinstance(step, Wait) and step.flag.kind is not FlagKind.DONE]


def test_ops_end_by_freeing_the_slot_once_all_pushes_ended() -> None:
    for key in keys(4, 8):
        steps = build(key, 1).steps
        tail = steps[-3:]
        assert all(isinstance(step, Signal) and step.flag.kind is FlagKind.DONE for step in tail)
        copies = [step for step in steps if step.queue is Queue.COPY]
        join = [step for step in steps if isinstance(step, Return)][-1] if key.zero_copy else tail[0]
        assert join.after == ((copies[-1].record,) if copies else ())


def test_one_rank_alone_pushes_and_waits_for_nothing() -> None:
    for key in keys(1, 3):
        steps = build(key, 0).steps
        pushes = [s for s in steps if s.queue is Queue.COPY and not key.zero_copy]  # which copies its shard to its place
        assert not pushes and not any(isinstance(s, Wait | Signal) for s in steps)


def test_chunks_are_pieces_of_the_whole() -> None:
    for chunks, pieces in [(0, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)]:
        schedule = build(Key("bulk_all_gather", 4, chunks), 0)
        assert len(of(schedule, Copy, Queue.COPY)) == 3 * pieces, chunks


def test_runs_and_splits() -> None:
    assert runs([6, 7, 0]) == [[6, 7], [0]]
    assert runs([3, 0, 1, 2]) == [[0, 1, 2, 3]]
    assert split([1, 2, 3, 4, 5], 2) == [[1, 2, 3], [4, 5]]
    assert split([1, 2], 5) == [[1], [2]]
    assert split([], 3) == []


def _kinds_of_compute(schedule: Schedule) -> str:
    """Return the COMPUTE queue in letters: m own matmul, i independent matmul, w wait, r Reduce, c copy, d DONE."""
    letters = {Wait: "w", Reduce: "r", Copy: "c", Signal: "d"}
    key = schedule.key
    steps = [step for step in schedule.steps if step.queue is Queue.COMPUTE]
    return "".join("mi"[key.is_independent(s)] if isinstance(s, Compute) else letters[type(s)] for s in steps)


@pytest.mark.parametrize(
    ("key", "queue"),
    [
        (Key("all_gather_matmul", 4, 0, contracts=(False,), independent=2), "miiwmwmwmddd"),
        (Key("all_gather_matmul", 4, 2, contracts=(False,), independent=2), "miiwwwmmddd"),
        (Key("all_gather_matmul", 4, 1, contracts=(False,), independent=1), "ciwwwmddd"),
        (Key("matmul_reduce_scatter", 3, 0, terms=1, independent=2), "mmmiiwwrdd"),
        (Key("matmul_all_reduce", 3, 0, terms=1, independent=1), "mmmwwriwcwcdd"),
        (Key("bulk_all_gather", 3, 0, independent=2), "iicwcwcdd"),
    ],
)
def test_independent_matmuls_run_before_the_waits(key: Key, queue: str) -> None:
    assert _kinds_of_compute(build(key, 1)) == queue


@pytest.mark.parametrize(
    ("key", "says"),
    [
        (Key("all_to_all", 2), "unknown"),
        (Key("bulk_all_gather", 0), "at least one rank"),
        (Key("bulk_all_gather", 2, chunks=-1), "chunks"),
        (Key("all_gather_matmul", 2, chunks=4, contracts=(True,), shard_dim_is_last=True), "at most 2"),
        (Key("all_gather_matmul", 2), "has no use"),
        (Key("all_gather_matmul", 2, contracts=(True,), terms=1), "terms at 0"),
        (Key("matmul_reduce_scatter", 2), "set terms"),
        (Key("matmul_all_reduce", 2, terms=1, contracts=(True,)), "contracts"),
        (Key("bulk_all_reduce", 2, independent=-1), "independent must be 0 or more"),
        (Key("bulk_all_reduce", 2, terms=1), "terms at 0"),
        (Key("matmul_reduce_scatter", 2, terms=1, shard_dim_is_last=True, striped=True), "striped needs"),
        (Key("all_gather_matmul", 2, contracts=(False,), striped=True), "striped needs"),
        (Key("all_gather_matmul", 2, contracts=(False,), direct=True), "direct needs"),
        (Key("bulk_reduce_scatter", 2, terms=1, direct=True), "direct needs"),
        (Key("matmul_reduce_scatter", 2, terms=2, direct=True), "direct needs"),
        (Key("matmul_reduce_scatter", 2, terms=1, shard_dim_is_last=True, direct=True), "direct needs"),
        (Key("matmul_reduce_scatter", 1, terms=1, direct=True), "two ranks or more"),
        (Key("matmul_reduce_scatter", 2, chunks=4, terms=1, direct=True), "neither chunks"),
        (Key("matmul_all_reduce", 2, terms=1, striped=True, direct=True), "nor stripes"),
    ],
)
def test_meaningless_keys_are_refused(key: Key, says: str) -> None:
    with pytest.raises(ScheduleError, match=says):
        build(key, 0)
    assert issubclass(ScheduleError, ValueError)


def test_ranks_outside_the_group_are_refused() -> None:
    with pytest.raises(ScheduleError, match="rank 2 is not in a group of 2"):
        build(Key("bulk_all_gather", 2), 2)


@pytest.mark.tier("test")
def test_the_package_does_not_import_torch() -> None:
    code = "import sys, ub_overlap.runtime.schedule; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0

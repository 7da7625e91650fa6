"""Sequences of calls: slot reuse, flag words, overlapping groups, skipped calls."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from tests.harness.tiers import full_but
from ub_overlap.runtime.schedule import (
    Key,
    Schedule,
    ScheduleError,
    build_all,
    check_pair,
    check_released,
    check_reuse,
    check_sequence,
    check_skip,
)
from ub_overlap.runtime.schedule.steps import Flag, FlagKind, Opaque, Queue, Signal, Wait

from .samples import keys


def without(schedules: tuple[Schedule, ...], drop: type, kind: FlagKind) -> tuple[Schedule, ...]:
    """Drop all ranks' steps of class `drop` on flags of `kind`. Joins of dropped steps move to the last step."""
    result = []
    for schedule in schedules:
        steps = [step for step in schedule.steps if not (isinstance(step, drop) and step.flag.kind is kind)]
        after = {event for step in schedule.steps if step not in steps for event in step.after}
        steps[-1] = replace(steps[-1], after=(*steps[-1].after, *sorted(after)))
        result.append(replace(schedule, steps=tuple(steps)))
    return tuple(result)


@pytest.mark.tier("full")
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_pair_of_kinds_shares_an_arena(ranks: int) -> None:
    for a in keys(ranks, ranks + 1):
        for b in keys(ranks, 1):
            check_pair(a, b)


@pytest.mark.tier("full")
def test_groups_of_different_sizes_share_a_copy_queue() -> None:
    for a in keys(4, 4):
        for b in list(keys(3, 0))[::3]:
            check_pair(a, b)


def test_larger_groups() -> None:
    samples = [key for i, key in enumerate(keys(8, 16)) if i % 2]
    for a, b in pairwise(samples):
        check_reuse(a, b)


def test_slot_reuse_needs_done() -> None:
    """An op without its DONE waits may not reuse a slot, for any calls in between."""
    for key in keys(3, 0):
        broken = without(build_all(key), Wait, FlagKind.DONE)
        with pytest.raises(ScheduleError) as error:
            check_sequence([broken] * 2, epochs=[1, 3])
        assert error.value.rule in ("slot reuse", "flag overwritten"), error.value


def test_every_call_between_orders_its_neighbours_too() -> None:
    """A missing DONE is detected only across a gap: a call that has ended was begun by all ranks.

    The gaps of check_pair make the proof independent of the calls in between.
    """
    broken = without(build_all(Key("all_gather_matmul", 3, contracts=(False,))), Wait, FlagKind.DONE)
    check_sequence([broken] * 4)


def test_a_flag_word_is_not_written_over_an_unseen_value() -> None:
    """A flag may not be overwritten before its reader has seen it. Ranks that only signal touch no slot."""

    def greet(rank: int, wait_first: bool) -> Schedule:
        peer = 1 - rank
        steps = [
            Opaque(queue=Queue.COMPUTE, name="nothing"),
            Signal(queue=Queue.COMPUTE, flag=Flag(FlagKind.READY, peer, rank)),
            Wait(queue=Queue.COMPUTE, flag=Flag(FlagKind.READY, rank, peer)),
            Signal(queue=Queue.COMPUTE, flag=Flag(FlagKind.DONE, peer, rank)),
        ]
        if wait_first:
            steps.insert(1, Wait(queue=Queue.COMPUTE, flag=Flag(FlagKind.DONE, rank, peer), back=2))
        return Schedule(Key("bulk_all_gather", 2), rank, tuple(steps))

    check_sequence([[greet(0, True), greet(1, True)]] * 3, epochs=[1, 3, 5])
    with pytest.raises(ScheduleError) as error:
        check_sequence([[greet(0, False), greet(1, True)]] * 2, epochs=[1, 3])
    assert error.value.rule == "flag overwritten"


def test_ready_words_may_be_cleared_before_done() -> None:
    """A READY without a wait for the slot's DONE, and a DONE before a wait for READY, are refused."""
    for key in keys(3, 0):
        schedules = build_all(key)
        check_released(schedules)
        with pytest.raises(ScheduleError, match="does not follow a wait for DONE") as error:
            check_released(without(schedules, Wait, FlagKind.DONE))
        assert error.value.rule == "released"
        early = []
        for schedule in schedules:
            done = [step for step in schedule.steps if isinstance(step, Signal) and step.flag.kind is FlagKind.DONE]
            rest = [step for step in schedule.steps if step not in done]
            early.append(replace(schedule, steps=(*(replace(step, after=()) for step in done), *rest)))
        with pytest.raises(ScheduleError, match="may signal DONE to rank") as error:
            check_released(early)
        assert error.value.rule == "released"


def test_missing_done_signals_are_unmatched_waits() -> None:
    broken = without(build_all(Key("all_gather_matmul", 2, contracts=(False,))), Signal, FlagKind.DONE)
    with pytest.raises(ScheduleError, match="no step of epoch 1 sends"):
        check_sequence([broken] * 3)


def test_groups_must_fit() -> None:
    schedules = build_all(Key("bulk_all_gather", 2))
    with pytest.raises(ScheduleError, match="2 schedules for the ranks"):
        check_sequence([schedules], groups=[(0, 1, 2)])
    with pytest.raises(ScheduleError, match="2 schedules for the ranks"):
        check_sequence([schedules], groups=[(1, 1)])


@pytest.mark.tier("test")
@pytest.mark.parametrize("ranks", full_but([2], [2, 3]))
def test_a_skipped_call_is_a_mismatch_or_a_blocked_wait(ranks: int) -> None:
    samples = list(keys(ranks, 0))
    for a, b in zip(samples, samples[1:] + samples[:1], strict=True):
        found = check_skip([build_all(a), build_all(b), build_all(b), build_all(a)])
        assert len(found) == 4 * ranks
        if a.is_split == b.is_split:  # split collectives have flags of their own, so another call's tag never meets theirs
            assert any(outcome.mismatched for outcome in found.values())
        assert all(outcome.mismatched or outcome.blocked for outcome in found.values())


def test_a_skipped_call_of_a_loop_blocks() -> None:
    """A skipped call of a repeated site blocks: calls match by count, and the last one misses a rank."""
    found = check_skip([build_all(Key("matmul_all_reduce", 3, 3, terms=1))] * 4)
    assert all(outcome.blocked and not outcome.mismatched for outcome in found.values())


def test_a_skipped_call_of_one_group_shows_on_two() -> None:
    a, b = build_all(Key("all_gather_matmul", 2, contracts=(False,))), build_all(Key("matmul_reduce_scatter", 2, terms=1))
    found = check_skip([a, b, a, b, a], groups=[(0, 1), (1, 2), (0, 1), (1, 2), (0, 1)])
    assert all(outcome.mismatched or outcome.blocked for outcome in found.values())


def test_skips_that_go_unseen_are_reported() -> None:
    """check_skip refuses an op that does not wait for all ranks (rank 0 only sends): a skipped call is undetected."""
    schedules = build_all(Key("bulk_all_gather", 2))
    mute = tuple(replace(s, steps=tuple(step for step in s.steps if not isinstance(step, Wait))) for s in schedules)
    with pytest.raises(ScheduleError, match="skipped call 0, and rank") as error:
        check_skip([mute])
    assert error.value.rule == "skip"
    nobody_cares = Key("all_gather_matmul", 2)  # no consumer: no builder builds this, as it computes nothing
    idle = [Schedule(nobody_cares, rank, (Opaque(queue=Queue.COMPUTE, name="idle"),)) for rank in (0, 1)]
    with pytest.raises(ScheduleError, match="every rank ended all its calls"):
        check_skip([idle])

"""Fused collectives: two slots in turn without DONE, any sizes and orders, and schedules that break the rule."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ub_overlap.runtime.schedule import (
    Key,
    Schedule,
    ScheduleError,
    build_all,
    check,
    check_pair,
    check_sequence,
    check_skip,
    happens_before,
    interpret,
)
from ub_overlap.runtime.schedule.checker import check_key_proof
from ub_overlap.runtime.schedule.encode import decode, encode
from ub_overlap.runtime.schedule.interpret import Machine, SimulatedCall
from ub_overlap.runtime.schedule.steps import Buf, Copy, Reduce, Wait

FUSED = ("one_shot_all_gather", "one_shot_reduce_scatter", "one_shot_all_reduce", "two_shot_all_reduce")


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("kind", FUSED)
def test_every_key_is_proven(ranks: int, kind: str) -> None:
    key = Key(kind, ranks)
    check_key_proof(key)
    assert [decode(encode(schedule), key, schedule.rank) for schedule in build_all(key)] == list(build_all(key))


@pytest.mark.parametrize("kind", FUSED)
@pytest.mark.parametrize("other", [*FUSED, "bulk_all_reduce", "split_all_gather"])
def test_pairs_are_proven(kind: str, other: str) -> None:
    check_pair(Key(kind, 3), Key(other, 3))


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 4), st.data(), st.integers(0, 2**32))
def test_every_order_is_proven_and_right(ranks: int, data: st.DataObject, seed: int) -> None:
    """Sequences of fused collectives, with other calls between, of any sizes and under any interleaving."""
    kinds = data.draw(st.lists(st.sampled_from([*FUSED, "bulk_all_reduce"]), min_size=1, max_size=7))
    calls = []
    for number, kind in enumerate(kinds):
        rows = data.draw(st.lists(st.integers(0, 3), min_size=ranks, max_size=ranks))
        calls.append(SimulatedCall(build_all(Key(kind, ranks)), tuple(range(ranks)), number + 1, tuple(rows)))
    check_sequence([call.schedules for call in calls])
    outcome = Machine(calls, seed).run()
    assert outcome.is_clean, outcome
    assert len(outcome.ended) == len(calls) * ranks


@pytest.mark.parametrize("kind", FUSED)
def test_one_slot_is_not_enough(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that has seen all READY of epoch e - 1 does not know that its peers have left it.

    In a two-shot call the second phase shows that they have read the first one, but layouts differ between calls.
    """
    monkeypatch.setattr(happens_before, "FUSED_SLOTS", 1)
    monkeypatch.setattr(interpret, "FUSED_SLOTS", 1)
    schedules = build_all(Key(kind, 2))
    with pytest.raises(ScheduleError, match="slot reuse|flag overwritten"):
        check_sequence([schedules] * 3)
    calls = [SimulatedCall(schedules, (0, 1), 1, (2, 2))] * 4
    assert kind.startswith("two_shot") or any(not Machine(calls, seed).run().is_clean for seed in range(40))


@pytest.mark.parametrize("kind", FUSED)
def test_a_call_that_hears_no_peer_is_refused(kind: str) -> None:
    """Its successor would write a slot that a peer may still read."""
    schedules = build_all(Key(kind, 2))
    deaf = tuple(replace(s, steps=tuple(step for step in s.steps if not isinstance(step, Wait))) for s in schedules)
    with pytest.raises(ScheduleError, match="heard|race|unwritten"):
        check(deaf)
    calls = [SimulatedCall(deaf, (0, 1), 1, (2, 2))] * 4
    assert any(Machine(calls, seed).run().wrong for seed in range(40))


def changed(schedule: Schedule, number: int, **fields: object) -> Schedule:
    steps = list(schedule.steps)
    steps[number] = replace(steps[number], **fields)  # type: ignore[arg-type]
    return replace(schedule, steps=tuple(steps))


def test_a_wrong_order_of_a_sum_is_refused() -> None:
    """Ranks would round differently."""
    schedules = list(build_all(Key("one_shot_all_reduce", 3)))
    number = next(i for i, step in enumerate(schedules[1].steps) if isinstance(step, Reduce))
    step = schedules[1].steps[number]
    assert isinstance(step, Reduce)
    schedules[1] = changed(schedules[1], number, srcs=tuple(reversed(step.srcs)))
    with pytest.raises(ScheduleError, match="result"):
        check(schedules)


def test_a_shard_lands_in_its_own_place() -> None:
    schedules = list(build_all(Key("one_shot_all_reduce", 2)))
    number = next(i for i, step in enumerate(schedules[0].steps) if isinstance(step, Copy))
    step = schedules[0].steps[number]
    assert isinstance(step, Copy)
    for index, rule in ((1, "written twice|race"), (2, "region")):
        with pytest.raises(ScheduleError, match=rule):
            check([changed(schedules[0], number, dst=replace(step.dst, index=index)), schedules[1]])
    other = list(build_all(Key("two_shot_all_reduce", 2)))
    moved = changed(other[0], 0, dst=replace(other[0].steps[0].dst, index=1))  # type: ignore[attr-defined]
    with pytest.raises(ScheduleError, match="only RESULT has an index"):
        check([moved, other[1]])
    assert step.dst.buf is Buf.LANDING


def test_a_skipped_call_is_noticed() -> None:
    check_skip([build_all(Key(kind, 3)) for kind in FUSED])


@pytest.mark.parametrize("fields", [{"chunks": 2}, {"independent": 1}, {"shard_dim_is_last": True}])
def test_keys_that_are_cut_are_refused(fields: dict[str, int]) -> None:
    with pytest.raises(ScheduleError, match="not cut"):
        build_all(Key("one_shot_all_reduce", 2, **fields))  # type: ignore[arg-type]

"""all_to_all: pieces with different numbers of rounds, rounds that take turns, and pieces that need no other."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ub_overlap.runtime.schedule import Key, Schedule, ScheduleError, build_all, check, check_interleaved, check_reuse
from ub_overlap.runtime.schedule.all_to_all_rules import check_repeats
from ub_overlap.runtime.schedule.builders import all_to_all
from ub_overlap.runtime.schedule.interpret import Machine, SimulatedCall
from ub_overlap.runtime.schedule.steps import Buf, Copy, FlagKind, Queue, Round, Signal, Step, Wait

from .test_split import refused

KIND = "split_all_to_all"


@st.composite
def exchanges(draw: st.DrawFn) -> tuple[SimulatedCall, ...]:
    """Draw calls of one slot, whose pieces have any rows and any numbers of rounds."""
    ranks = draw(st.integers(1, 4))
    calls = []
    for number in range(draw(st.integers(1, 3))):
        of = draw(st.lists(st.integers(1, 4), min_size=ranks * ranks, max_size=ranks * ranks))
        rows = draw(st.lists(st.integers(0, 5), min_size=ranks * ranks, max_size=ranks * ranks))
        key = Key(KIND, ranks, 2)
        schedules = tuple(
            all_to_all.build(key, rank, lambda source, to, of=of: of[source * ranks + to]) for rank in range(ranks)
        )
        calls.append(SimulatedCall(schedules, tuple(range(ranks)), number + 1, tuple(rows)))
    return tuple(calls)


@settings(max_examples=60, deadline=None)
@given(exchanges(), st.integers(0, 2**32))
def test_any_rounds_are_proven_and_right(calls: tuple[SimulatedCall, ...], seed: int) -> None:
    for call in calls:
        check(call.schedules)
    outcome = Machine(calls, seed).run()
    assert outcome.is_clean, outcome
    assert len(outcome.ended) == len(calls) * len(calls[0].group)


@pytest.mark.parametrize("ranks", [2, 4])
def test_shares_slots_with_other_kinds(ranks: int) -> None:
    key = Key(KIND, ranks, 2)
    for other in (key, Key("split_all_reduce", ranks), Key("split_all_gather", ranks, zero_copy=True)):
        check_reuse(key, other)
        check_interleaved(key, other)
    check_interleaved(key, Key("bulk_all_reduce", ranks))


def test_further_rounds_repeat_the_second() -> None:
    """Executors repeat the steps of one round. A round that differs is refused."""
    good = build_all(Key(KIND, 3, 4))
    check_repeats(good)
    cuts = [place for place, step in enumerate(good[0].steps) if isinstance(step, Round)]
    assert len(cuts) == 4 and {b - a for a, b in pairwise(cuts)} == {cuts[1] - cuts[0]}
    for place in range(cuts[1] + 1, cuts[2]):
        with pytest.raises(ScheduleError, match="further rounds differ"):
            check_repeats(_drop(Key(KIND, 3, 4), place))


def _drop(key: Key, place: int) -> tuple[Schedule, ...]:
    """Return the schedules without one step of rank 0."""
    first, *rest = build_all(key)
    return (replace(first, steps=(*first.steps[:place], *first.steps[place + 1 :])), *rest)


def test_rounds_take_turns() -> None:
    """Without the wait for READY2 a push overwrites a round that was not copied out: in the rules, and in rows."""
    key = Key(KIND, 2, 3)
    steps = build_all(key)[0].steps
    credits = [i for i, step in enumerate(steps) if isinstance(step, Wait) and step.flag.kind is FlagKind.READY2]
    assert len(credits) == 2
    both = [
        replace(s, steps=tuple(step for step in s.steps if _flag_kind(step) is not FlagKind.READY2)) for s in build_all(key)
    ]
    with pytest.raises(ScheduleError, match="area"):
        check(both)
    call = SimulatedCall(tuple(both), (0, 1), 1, (6, 6, 6, 6))
    outcomes = [Machine([call] * 2, seed).run() for seed in range(40)]
    assert any(outcome.wrong or outcome.blocked for outcome in outcomes)
    for place in credits:
        with pytest.raises(ScheduleError):
            check(_drop(key, place))


def _flag_kind(step: Step) -> FlagKind | None:
    return step.flag.kind if isinstance(step, (Signal, Wait)) else None


def test_pieces_are_independent() -> None:
    """A piece whose order needs the events of another is refused, as that one may have ended."""
    key = Key(KIND, 3, 2)
    schedules = list(build_all(key))
    steps = list(schedules[0].steps)
    at = next(i for i, s in enumerate(steps) if isinstance(s, Copy) and s.dst.buf is Buf.OUTPUT and s.src.buf is Buf.LANDING)
    wait = next(i for i, s in enumerate(steps) if isinstance(s, Wait) and s.queue is Queue.COMPUTE)
    assert wait == at - 1
    # The copy of one piece on COPY, behind an event of its wait: right with all pieces, but no order of the piece alone.
    event = 1 + max((s.record for s in steps if s.record is not None), default=0)
    steps[wait] = replace(steps[wait], record=event)
    steps[at] = replace(steps[at], queue=Queue.COPY, after=(event,))
    schedules[0] = replace(schedules[0], steps=tuple(steps))
    with pytest.raises(ScheduleError, match="race|unwritten|slot reuse|area|overwritten"):
        check(schedules)


def test_markers_are_checked() -> None:
    key = Key(KIND, 2, 2)
    steps = list(build_all(key)[0].steps)
    cut = next(i for i, step in enumerate(steps) if isinstance(step, Round))
    refused("round", key, [*steps[:cut], *steps[cut + 1 :]], "of 1 Rounds")
    refused("split", key, [steps[cut], *steps], "runs no COMPUTE step")
    refused("round", key, [*steps[:cut], replace(steps[cut], queue=Queue.COPY), *steps[cut + 1 :]], "in pairs")
    bulk = Key("bulk_all_gather", 2)
    refused("round", bulk, [steps[cut], *build_all(bulk)[0].steps], "in pairs")
    with pytest.raises(ScheduleError, match="leave shard_dim_is_last"):
        build_all(Key(KIND, 2, 2, shard_dim_is_last=True))

"""Split collectives: several open at once, other calls between start and finish, and starts that do too much."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ub_overlap.runtime.schedule import Key, Schedule, ScheduleError, build_all, check, check_interleaved, check_sequence
from ub_overlap.runtime.schedule.interpret import Machine, SimulatedCall
from ub_overlap.runtime.schedule.steps import (
    Buf,
    Copy,
    Flag,
    FlagKind,
    Part,
    Queue,
    Region,
    Release,
    Return,
    Signal,
    Wait,
)

SPLIT = ("split_all_gather", "split_reduce_scatter", "split_all_reduce")
Program = list[tuple[int, Part]]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", SPLIT)
@pytest.mark.parametrize("other", [*SPLIT, "bulk_all_reduce", "all_gather_matmul"])
def test_interleavings_are_proven(ranks: int, kind: str, other: str) -> None:
    contracts = (False,) if other == "all_gather_matmul" else ()
    check_interleaved(Key(kind, ranks), Key(other, ranks, contracts=contracts))
    check_interleaved(Key(other, ranks, contracts=contracts), Key(kind, ranks, 2 * ranks))
    if kind == "split_all_gather":
        in_place = Key(kind, ranks, 2 * ranks, zero_copy=True)
        check_interleaved(in_place, Key(other, ranks, contracts=contracts))
        check_interleaved(Key(other, ranks, contracts=contracts), in_place)
        check_interleaved(in_place, replace(in_place, chunks=0))


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[SimulatedCall], Program]:
    """Draw calls, split ones on up to three slots, and an order in which all are issued, finished and released."""
    ranks = draw(st.integers(1, 4))
    chunks = draw(st.sampled_from([0, 1, ranks, 2 * ranks]))
    kinds = [*(Key(kind, ranks, chunks) for kind in SPLIT), Key("split_all_gather", ranks, chunks, zero_copy=True)]
    kinds += [Key("bulk_all_gather", ranks, chunks), Key("matmul_all_reduce", ranks, chunks, terms=1)]
    calls: list[SimulatedCall] = []
    program: Program = []
    opened: dict[int, tuple[int, list[Part]]] = {}  # split slot -> number of the call, its next parts

    def advance(slot: int) -> None:
        number, parts = opened[slot]
        program.append((number, parts.pop(0)))
        if not parts:
            del opened[slot]

    for number in range(draw(st.integers(1, 7))):
        key = draw(st.sampled_from(kinds))
        slot = draw(st.integers(0, 2))
        rows = draw(st.lists(st.integers(0, 3), min_size=ranks, max_size=ranks))
        calls.append(SimulatedCall(build_all(key), tuple(range(ranks)), number + 1, tuple(rows), slot))
        if not key.is_split:
            program.append((number, Part.WHOLE))
            continue
        while slot in opened:
            advance(slot)
        opened[slot] = number, list(key.parts)
        advance(slot)
        for ended in draw(st.lists(st.sampled_from(sorted(opened)), max_size=2, unique=True)):
            advance(ended)
    for slot in sorted(opened):
        while slot in opened:
            advance(slot)
    return calls, program


@settings(max_examples=80, deadline=None)
@given(programs(), st.integers(0, 2**32))
def test_every_order_is_proven_and_right(drawn: tuple[list[SimulatedCall], Program], seed: int) -> None:
    calls, program = drawn
    check_sequence([call.schedules for call in calls], split_slots=[call.split_slot for call in calls], program=program)
    outcome = Machine(calls, seed, programs=dict.fromkeys(calls[0].group, program)).run()
    assert outcome.is_clean, outcome
    assert len(outcome.ended) == len(calls) * len(calls[0].group)


def test_a_rank_that_never_finishes_blocks_only_its_slot() -> None:
    """Peers finish the open collective and other calls. The next finish of the slot waits for the rank."""
    split = SimulatedCall(build_all(Key("split_all_gather", 2)), (0, 1), 1, (2, 2))
    other = SimulatedCall(build_all(Key("bulk_all_reduce", 2)), (0, 1), 2, (2, 2))
    right: Program = [(0, Part.START), (1, Part.WHOLE), (0, Part.FINISH), (2, Part.START), (2, Part.FINISH)]
    never: Program = [(0, Part.START), (1, Part.WHOLE)]
    for seed in range(6):
        outcome = Machine([split, other, split], seed, programs={0: right, 1: never}).run()
        assert sorted(outcome.ended) == [(0, 0), (1, 0), (1, 1)]
        assert not outcome.wrong
        assert len(outcome.blocked) == 1
        assert "rank 0 call 2: Wait READY@0 from 1" in outcome.blocked[0]


def test_orders_that_differ_between_ranks() -> None:
    """In one slot they are a mismatch of sites. Between slots they are right, or a wait that ends at its deadline."""
    calls = [SimulatedCall(build_all(Key("split_all_gather", 2)), (0, 1), tag, (2, 2), slot) for tag, slot in ((1, 0), (2, 0))]
    forth: Program = [(0, Part.START), (0, Part.FINISH), (1, Part.START), (1, Part.FINISH)]
    back: Program = [(1, Part.START), (1, Part.FINISH), (0, Part.START), (0, Part.FINISH)]
    for seed in range(6):
        outcome = Machine(calls, seed, programs={0: forth, 1: back}).run()
        assert outcome.mismatched
        assert not outcome.wrong
    calls[1] = replace(calls[1], split_slot=1)
    for seed in range(6):
        outcome = Machine(calls, seed, programs={0: forth, 1: back}).run()
        assert len(outcome.blocked) == 2
        assert not outcome.wrong
    opened = [(0, Part.START), (1, Part.START), (0, Part.FINISH), (1, Part.FINISH)]
    swapped = [(1, Part.START), (0, Part.START), (1, Part.FINISH), (0, Part.FINISH)]
    for seed in range(6):
        assert Machine(calls, seed, programs={0: opened, 1: swapped}).run().is_clean


def test_the_finish_of_an_all_reduce_waits_for_those_of_its_peers() -> None:
    """Ranks that finish two calls in different orders block each other, where one of them is an all_reduce."""
    forth: Program = [(0, Part.START), (0, Part.FINISH), (1, Part.START), (1, Part.FINISH)]
    back: Program = [(0, Part.START), (1, Part.START), (1, Part.FINISH), (0, Part.FINISH)]
    for kind in ("split_all_reduce", "split_all_gather"):
        schedules = [build_all(Key(kind, 2)), build_all(Key("split_all_gather", 2))]
        calls = [SimulatedCall(schedules[n], (0, 1), n + 1, (2, 2), n) for n in range(2)]
        for seed in range(6):
            outcome = Machine(calls, seed, programs={0: forth, 1: back}).run()
            assert len(outcome.blocked) == (2 if kind == "split_all_reduce" else 0) and not outcome.wrong


@st.composite
def programs_by_rank(draw: st.DrawFn) -> tuple[list[SimulatedCall], dict[int, Program]]:
    """Return calls that all ranks start in one order, and finish and release where each rank likes.

    All ranks finish an all_reduce at one place of that order: its finish waits for those of the others.
    """
    ranks = draw(st.integers(2, 3))
    kinds = [Key(kind, ranks) for kind in ("split_all_gather", "split_reduce_scatter", "bulk_all_reduce")]
    kinds += [Key("split_all_gather", ranks, zero_copy=True), Key("split_all_reduce", ranks)]
    calls = [
        SimulatedCall(build_all(draw(st.sampled_from(kinds))), tuple(range(ranks)), tag, (2,) * ranks, draw(st.integers(0, 2)))
        for tag in range(1, draw(st.integers(2, 6)) + 1)
    ]
    together = [draw(st.booleans()) for _ in calls]  # whether an all_reduce ends right behind its start, or with its slot
    orders: dict[int, Program] = {}
    for rank in range(ranks):
        opened: dict[int, list[tuple[int, Part]]] = {}
        program: list[tuple[int, Part]] = []
        for number, call in enumerate(calls):
            key = call.schedules[0].key
            if not key.is_split:
                program.append((number, Part.WHOLE))
                continue
            program += opened.pop(call.split_slot, [])
            first, *later = [(number, part) for part in key.parts]
            program.append(first)
            opened[call.split_slot] = later
            if key.kind == "split_all_reduce" and together[number]:
                program += opened.pop(call.split_slot)
            free = [
                slot for slot, ((n, _), *_) in sorted(opened.items()) if calls[n].schedules[0].key.kind != "split_all_reduce"
            ]
            for slot in draw(st.lists(st.sampled_from(free), max_size=2, unique=True)) if free else []:
                program += opened.pop(slot)
        for slot in sorted(opened):  # all_reduces in one order, the others anywhere between
            if calls[opened[slot][0][0]].schedules[0].key.kind == "split_all_reduce":
                program += opened.pop(slot)
        for slot in draw(st.permutations(sorted(opened))):
            program += opened[slot]
        orders[rank] = program
    return calls, orders


@settings(max_examples=80, deadline=None)
@given(programs_by_rank(), st.integers(0, 2**32))
def test_ranks_may_finish_in_different_orders(drawn: tuple[list[SimulatedCall], dict[int, Program]], seed: int) -> None:
    """With one order of starts and whole calls, each rank may finish where it needs the result."""
    calls, orders = drawn
    outcome = Machine(calls, seed, programs=orders).run()
    assert outcome.is_clean, outcome
    assert len(outcome.ended) == len(calls) * len(calls[0].group)


def refused(rule: str, key: Key, steps: list[object], says: str = "") -> None:
    schedules = list(build_all(key))
    schedules[0] = Schedule(key, 0, tuple(steps))  # type: ignore[arg-type]
    with pytest.raises(ScheduleError, match=f"{rule}.*{says}"):
        check(schedules)


def test_starts_that_do_too_much_are_refused() -> None:
    key = Key("split_all_gather", 2)
    steps = list(build_all(key)[0].steps)
    cut = next(i for i, step in enumerate(steps) if isinstance(step, Return))
    end = steps[cut]
    refused("split", key, [step for step in steps if step is not end], "0 Return steps")
    refused("split", key, [*steps, end], "2 Return steps")
    refused("split", key, [*steps[:cut], replace(end, queue=Queue.COPY), *steps[cut + 1 :]], "expected 1 on COMPUTE")
    early = Wait(queue=Queue.COPY, flag=Flag(FlagKind.READY, 0, 1))
    refused("split", key, [early, *steps], "waits for no peer")
    local = Copy(queue=Queue.COMPUTE, src=Region(Buf.INPUT, 0, 0), dst=Region(Buf.OUTPUT, 0, 0))
    refused("split", key, [local, *steps], "runs no COMPUTE step")
    refused("split", key, [replace(local, queue=Queue.COPY), *steps], "belongs to finish")
    bulk = Key("bulk_all_gather", 2)
    refused("split", bulk, [end, *build_all(bulk)[0].steps], "expected 0")


def test_releases_that_do_too_much_are_refused() -> None:
    key = Key("split_all_gather", 2, zero_copy=True)
    steps = list(build_all(key)[0].steps)
    first, second = (i for i, step in enumerate(steps) if isinstance(step, Return))
    at = next(i for i, step in enumerate(steps) if isinstance(step, Release))
    end, released, done = steps[second], steps[at], steps[-1]
    assert isinstance(released, Release) and isinstance(done, Signal) and at == second + 1
    refused("split", key, [step for step in steps if step is not end], "1 Return steps")
    refused("split", key, [step for step in steps if step is not released], "one Release|no Release")
    refused("split", key, [*steps, released], "one Release")
    refused("split", key, [*steps[:at], replace(released, reads=released.reads[:1]), *steps[at + 1 :]], "all of LANDING")
    refused("split", key, [*steps[: first + 1], *steps[second:at], released, *steps[first + 1 : second], done], "only signals")
    late = [replace(end, after=()), replace(released, after=end.after)]
    refused("join", key, [*steps[:second], *late, *steps[at + 1 :]], "may still run")
    copying = Key("split_all_gather", 2)
    refused("split", copying, [*build_all(copying)[0].steps, released], "others none")
    with pytest.raises(ScheduleError, match="needs a split all_gather"):
        build_all(Key("split_all_reduce", 2, zero_copy=True))


def test_a_result_is_read_until_its_release() -> None:
    """A rank that signals DONE at its finish lets peers overwrite what it reads. A start in front of the release does, too."""
    key = Key("split_all_gather", 2, zero_copy=True)

    def early(schedule: Schedule) -> Schedule:
        rest = [step for step in schedule.steps if not (isinstance(step, Signal) and step.flag.kind is FlagKind.DONE)]
        place = next(i for i, step in enumerate(rest) if isinstance(step, Wait) and not step.back) + 1
        return replace(schedule, steps=(*rest[:place], schedule.steps[-1], *rest[place:]))

    broken = tuple(early(schedule) for schedule in build_all(key))
    with pytest.raises(ScheduleError, match="slot reuse"):
        check_sequence([broken, broken])
    call = SimulatedCall(broken, (0, 1), 1, (2, 2))
    assert any(Machine([call] * 3, seed, programs=whole_programs(3)).run().wrong for seed in range(40))
    right = build_all(key)
    hasty = [(0, Part.START), (0, Part.FINISH), (1, Part.START), (0, Part.RELEASE), (1, Part.FINISH), (1, Part.RELEASE)]
    with pytest.raises(ScheduleError, match="circular wait|issue order|slot reuse"):
        check_sequence([right, right], program=hasty)


def whole_programs(count: int) -> dict[int, Program]:
    """Return the programs of two ranks that run zero-copy gathers one after the other."""
    program = [(number, part) for number in range(count) for part in (Part.START, Part.FINISH, Part.RELEASE)]
    return dict.fromkeys((0, 1), program)


def test_a_slot_needs_its_done() -> None:
    """Without the wait for DONE the next start overwrites what a late peer has not read."""
    key = Key("split_reduce_scatter", 2)
    broken = tuple(
        replace(schedule, steps=tuple(s for s in schedule.steps if not (isinstance(s, Wait) and s.back)))
        for schedule in build_all(key)
    )
    with pytest.raises(ScheduleError, match="slot reuse|flag overwritten"):
        check_sequence([broken, broken])
    call = SimulatedCall(broken, (0, 1), 1, (2, 2))
    assert any(Machine([call] * 3, seed).run().wrong for seed in range(40))

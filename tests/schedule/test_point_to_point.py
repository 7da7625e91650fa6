"""The schedule of a channel: proven for any number of slots, and every change of it that matters is found."""

from __future__ import annotations

from dataclasses import astuple, replace

import pytest

from ub_overlap.runtime.schedule import Key, Schedule, ScheduleError, build_all
from ub_overlap.runtime.schedule.builders import check_key
from ub_overlap.runtime.schedule.checker import check_channel
from ub_overlap.runtime.schedule.encode import decode, encode, prove_pair, provide
from ub_overlap.runtime.schedule.steps import Buf, Copy, Region, Step, Wait

SOURCE, DESTINATION = 0, 1


def ends(slots: int) -> tuple[Schedule, Schedule]:
    source, destination = build_all(Key("point_to_point", 2, slots))
    return source, destination


@pytest.mark.parametrize("slots", [1, 2, 3, 4, 8])
def test_pieces_over_slots_are_proven(slots: int) -> None:
    check_channel(ends(slots))


def changed(slots: int, end: int, *steps: Step) -> list[Schedule]:
    schedules = list(ends(slots))
    schedules[end] = replace(schedules[end], steps=steps)
    return schedules


@pytest.mark.parametrize("slots", [1, 4])
def test_changes_are_found(slots: int) -> None:
    wait_done, push, ready = ends(slots)[SOURCE].steps
    wait_ready, pull, done = ends(slots)[DESTINATION].steps
    assert isinstance(wait_done, Wait) and isinstance(pull, Copy)
    part = replace(pull, src=replace(pull.src, hi=pull.src.hi / 2), dst=replace(pull.dst, hi=pull.dst.hi / 2))
    elsewhere = replace(pull, dst=Region(Buf.PARTIAL, DESTINATION, SOURCE))
    for end, steps in (
        (SOURCE, (push, ready)),  # overwrites what is not read
        (SOURCE, (replace(wait_done, back=2 * slots), push, ready)),
        (SOURCE, (replace(wait_done, back=slots + 1), push, ready)),
        (SOURCE, (push, wait_done, ready)),
        (SOURCE, (wait_done, ready, push)),  # READY before the data
        (SOURCE, (wait_done, push)),
        (DESTINATION, (pull, done)),
        (DESTINATION, (pull, wait_ready, done)),
        (DESTINATION, (wait_ready, done, pull)),  # DONE before the copy
        (DESTINATION, (wait_ready, pull)),
        (DESTINATION, (wait_ready, done)),  # delivers nothing
        (DESTINATION, (wait_ready, part, done)),
        (DESTINATION, (wait_ready, elsewhere, done)),
    ):
        with pytest.raises(ScheduleError):
            check_channel(changed(slots, end, *steps))


def test_a_channel_next_to_other_calls() -> None:
    """A channel has slots of its own: a process may make one after calls of any other key."""
    channel = astuple(Key("point_to_point", 2, 4))
    for other in (Key("split_all_gather", 2), Key("matmul_reduce_scatter", 2), Key("split_reduce_scatter", 4)):
        prove_pair(channel, astuple(other))
        prove_pair(astuple(other), channel)


def test_ends_that_wait_for_each_other() -> None:
    wait_done, push, ready = ends(1)[SOURCE].steps
    assert isinstance(wait_done, Wait)
    with pytest.raises(ScheduleError):
        check_channel(changed(1, SOURCE, replace(wait_done, back=0), push, ready))


def test_keys() -> None:
    for key in (Key("point_to_point", 3, 2), Key("point_to_point", 2, 0), Key("point_to_point", 2, 1, independent=1)):
        with pytest.raises(ScheduleError):
            check_key(key)


def test_the_executors_get_it_next_to_other_keys() -> None:
    fields = ("point_to_point", 2, 4, (), 0, 0, False, False, False, False)
    for end in (SOURCE, DESTINATION):
        rows = provide(fields, end)
        assert decode(rows, Key("point_to_point", 2, 4), end) == ends(4)[end]
        assert rows == encode(ends(4)[end])
    prove_pair(fields, ("bulk_all_gather", 2, 0, (), 0, 0, False, False, False, False))

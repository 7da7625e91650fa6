"""The rules for the parts of a split collective: its start returns while its pushes run, and its release only signals."""

from __future__ import annotations

from collections.abc import Sequence

from .effects import accesses, show, show_region, waits
from .schedule_error import ScheduleError
from .steps import Buf, Part, Queue, Region, Release, Return, Schedule, Signal


def check_split(schedules: Sequence[Schedule]) -> None:
    """Check that every part of a split collective but the last ends with a Return, that its start only copies its input, and
    that the release of a zero-copy gather only signals.

    Other schedules have neither Return nor Release.
    """
    for schedule in schedules:
        returns = [step for step in schedule.steps if isinstance(step, Return)]
        expected = len(schedule.key.parts) - 1
        if len(returns) != expected or any(step.queue is not Queue.COMPUTE for step in returns):
            raise ScheduleError(
                "split",
                f"rank {schedule.rank} has {len(returns)} Return steps, expected {expected} on COMPUTE, in {schedule.key}",
            )
        if expected:
            _check_start(schedule)
        _check_release(schedule)


def _check_release(schedule: Schedule) -> None:
    """Check the one Release of a zero-copy gather: it reads the whole result, and nothing but signals follows."""
    places = schedule.places(Part.RELEASE) if schedule.key.zero_copy else range(0)
    for place, step in enumerate(schedule.steps):
        where = f"rank {schedule.rank} step {place} ({step.queue.name}: {show(step)})"
        if isinstance(step, Release) != (place in places[:1]):
            raise ScheduleError("split", f"{where}: a zero-copy gather has one Release, behind its second Return; others none")
        if isinstance(step, Release):
            whole = [Region(Buf.LANDING, schedule.rank, shard) for shard in range(schedule.key.ranks)]
            if step.queue is not Queue.COMPUTE or list(step.reads) != whole:
                raise ScheduleError("split", f"{where}, expected all of LANDING, on COMPUTE")
        elif place in places and (step.queue is not Queue.COMPUTE or not isinstance(step, Signal)):
            raise ScheduleError("split", f"{where} follows Release: it only signals")
    if schedule.key.zero_copy and not places:
        raise ScheduleError("split", f"rank {schedule.rank} has no Release, in {schedule.key}")


def _check_start(schedule: Schedule) -> None:
    for place in schedule.places(Part.START):
        step = schedule.steps[place]
        where = f"rank {schedule.rank} step {place} ({step.queue.name}: {show(step)})"
        if isinstance(step, Return):
            continue
        if step.queue is Queue.COMPUTE:
            raise ScheduleError("split", f"{where} is before Return: start runs no COMPUTE step")
        for wait in waits(step):
            if wait.back == 0:
                raise ScheduleError("split", f"{where} is before Return: start waits for no peer of its own call")
        for access in accesses(step, schedule.rank):
            if access.region.buf not in (Buf.INPUT, Buf.LANDING, Buf.LANDING2):
                raise ScheduleError("split", f"{where} is before Return: {show_region(access.region)} belongs to finish")

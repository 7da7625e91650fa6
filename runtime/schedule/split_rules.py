"""The rules for the start of a split collective, which returns while its pushes run."""

from __future__ import annotations

from collections.abc import Sequence

from .effects import accesses, show, show_region, waits
from .schedule_error import ScheduleError
from .steps import Buf, Part, Queue, Return, Schedule


def check_split(schedules: Sequence[Schedule]) -> None:
    """Check that every schedule of a split collective has one Return, and that its start only pushes its input.

    Other schedules have no Return.
    """
    for schedule in schedules:
        returns = [step for step in schedule.steps if isinstance(step, Return)]
        expected = int(schedule.key.is_split)
        if len(returns) != expected or any(step.queue is not Queue.COMPUTE for step in returns):
            raise ScheduleError(
                "split",
                f"rank {schedule.rank} has {len(returns)} Return steps, expected {expected} on COMPUTE, in {schedule.key}",
            )
        if expected:
            _check_start(schedule)


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

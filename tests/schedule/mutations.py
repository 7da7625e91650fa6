"""Mutations of a schedule, as lists of (name, broken schedule).

The checker must refuse all `harmful` ones. `any_order` ones may be harmless, and then run on the reference executor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

from ub_overlap.runtime.schedule import Key, Schedule
from ub_overlap.runtime.schedule.effects import accesses
from ub_overlap.runtime.schedule.steps import (
    Buf,
    Compute,
    Copy,
    Finish,
    Flag,
    FlagKind,
    Queue,
    Reduce,
    Region,
    Signal,
    Step,
    Wait,
)

Broken = tuple[str, Schedule]


def delete(schedule: Schedule, place: int) -> Schedule:
    """Delete one step. Its event moves to the previous step of its queue, so only the step itself is missing."""
    steps = list(schedule.steps)
    gone = steps.pop(place)
    if gone.record is not None:
        before = [i for i in range(place) if steps[i].queue is gone.queue]
        event: tuple[int, ...] = ()
        if before:
            heir = steps[before[-1]]
            event = (gone.record if heir.record is None else heir.record,)
            steps[before[-1]] = replace(heir, record=event[0])
        for i, step in enumerate(steps):
            if gone.record in step.after:
                steps[i] = replace(step, after=tuple(e for e in step.after if e != gone.record) + event)
    return replace(schedule, steps=tuple(steps))


def harmful(schedule: Schedule) -> Iterator[Broken]:
    """Return every single-step deletion, dropped event, retargeted flag or region, and duplicated store."""
    for place, step in enumerate(schedule.steps):
        yield f"without {place} {step}", delete(schedule, place)
        for changed in (*_without_events(step), *_retargeted(step, schedule.key)):
            yield f"{place} {step} as {changed}", _with(schedule, place, changed)
        if isinstance(step, (Copy, Compute, Reduce, Finish)):
            again = (*schedule.steps[: place + 1], replace(step, record=None), *schedule.steps[place + 1 :])
            yield f"{place} {step} twice", replace(schedule, steps=again)
    for i, j in _neighbours(schedule):
        first, second = schedule.steps[i], schedule.steps[j]
        is_push = any(access.write and access.region.buf.in_arena for access in accesses(first, schedule.rank))
        told_too_early = is_push and isinstance(second, Signal)
        read_too_early = isinstance(first, Wait) and any(
            access.region.buf.in_arena and access.region.shard == first.flag.source
            for access in accesses(second, schedule.rank)
        )
        if told_too_early or read_too_early:
            yield f"{j} before {i}: {second}", _swap(schedule, i, j)


def any_order(schedule: Schedule) -> Iterator[Broken]:
    """Return swaps of adjacent steps of a queue, and moves of steps to the other queue."""
    for i, j in _neighbours(schedule):
        yield f"{j} before {i}", _swap(schedule, i, j)
    for place, step in enumerate(schedule.steps):
        other = Queue.COPY if step.queue is Queue.COMPUTE else Queue.COMPUTE
        yield f"{place} on {other.name}", _with(schedule, place, replace(step, queue=other))


def _neighbours(schedule: Schedule) -> Iterator[tuple[int, int]]:
    for queue in Queue:
        places = [i for i, step in enumerate(schedule.steps) if step.queue is queue]
        yield from pairwise(places)


def _with(schedule: Schedule, place: int, step: Step) -> Schedule:
    return replace(schedule, steps=(*schedule.steps[:place], step, *schedule.steps[place + 1 :]))


def _swap(schedule: Schedule, i: int, j: int) -> Schedule:
    """Swap two steps. Their waits and events stay in place, so only the order of the steps changes."""
    steps = list(schedule.steps)
    first, second = steps[i], steps[j]
    steps[i] = replace(second, after=first.after, record=first.record)
    steps[j] = replace(first, after=second.after, record=second.record)
    return replace(schedule, steps=tuple(steps))


def _without_events(step: Step) -> Iterator[Step]:
    if step.after:
        yield replace(step, after=())


def _retargeted(step: Step, key: Key) -> Iterator[Step]:
    ranks = key.ranks
    match step:
        case Copy():
            yield from (replace(step, src=region) for region in _other_regions(step.src, ranks))
            yield from (replace(step, dst=region) for region in _other_regions(step.dst, ranks))
        case Signal():
            yield from (replace(step, flag=flag) for flag in _other_flags(step.flag, ranks))
        case Wait():
            # The previous piece, not the next: a source pushes in order, so a wait for a later piece is only stronger.
            yield replace(step, flag=replace(step.flag, index=step.flag.index - 1))
            yield from (replace(step, flag=flag) for flag in _other_flags(step.flag, ranks) if flag.index == step.flag.index)
            yield replace(step, back=key.slot_distance - step.back)
        case Compute():
            yield replace(step, accumulate=not step.accumulate)
            yield replace(step, index=step.index + 1)
            yield replace(step, writes=step.writes[1:])
            for i, region in enumerate(step.writes):
                for other in _other_regions(region, ranks):
                    yield replace(step, writes=(*step.writes[:i], other, *step.writes[i + 1 :]))
            for i, region in enumerate(step.reads):
                yield replace(step, reads=(*step.reads[:i], *step.reads[i + 1 :]))
                for other in _other_regions(region, ranks):
                    yield replace(step, reads=(*step.reads[:i], other, *step.reads[i + 1 :]))
        case Reduce():
            yield replace(step, srcs=step.srcs[1:])
            yield from (replace(step, dst=region) for region in _other_regions(step.dst, ranks))
            if ranks > 1:
                yield replace(step, srcs=step.srcs[::-1])
        case Finish():
            yield replace(step, index=step.index + 1)


def _other_regions(region: Region, ranks: int) -> Iterator[Region]:
    if ranks > 1:
        yield replace(region, rank=(region.rank + 1) % ranks)
        yield replace(region, shard=(region.shard + 1) % ranks)
    yield replace(region, hi=region.lo + (region.hi - region.lo) / Fraction(2))
    yield replace(region, index=region.index + 1)
    yield replace(region, buf=Buf.LANDING2 if region.buf is not Buf.LANDING2 else Buf.LANDING)


def _other_flags(flag: Flag, ranks: int) -> Iterator[Flag]:
    yield replace(flag, rank=(flag.rank + 1) % ranks)
    yield replace(flag, source=(flag.source + 1) % ranks)
    yield replace(flag, index=flag.index + 1)
    yield replace(flag, kind=FlagKind((flag.kind + 1) % 3))

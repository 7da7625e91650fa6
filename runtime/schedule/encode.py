"""Encode schedules as plain integers for C++. The layout is the table in docs/explanation/schedules.md.

C++ calls `provide` (with the GIL, once per new key). It builds the schedules of all ranks, proves them, and returns that of
the calling rank. Every rank proves independently: equal keys give equal schedules, so ranks need not exchange the outcome.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

from .builders import build_all
from .checker import check_channel, check_interleaved, check_reuse, check_sequence
from .effects import show
from .schedule_error import ScheduleError
from .steps import (
    Buf,
    Compute,
    ComputeKind,
    Copy,
    Finish,
    Flag,
    FlagKind,
    Key,
    Queue,
    Reduce,
    Region,
    Release,
    Return,
    Round,
    Schedule,
    Signal,
    Step,
    Wait,
)

COPY, SIGNAL, WAIT, COMPUTE, REDUCE, FINISH, RETURN, RELEASE, ROUND = range(9)
Row = tuple[int, ...]


def provide(key: tuple[Any, ...], rank: int) -> list[Row]:
    """Return the proven, encoded schedule of `rank` for `key`, a `Key` as a plain tuple."""
    return list(_proven(_key(key))[rank])


def prove_pair(key_a: tuple[Any, ...], key_b: tuple[Any, ...]) -> None:
    """Prove that calls of both keys may share a group's arena in any order, or raise ScheduleError. Cached and symmetric."""
    first, second = sorted((_key(key_a), _key(key_b)), key=repr)
    check_reuse(first, second)
    check_interleaved(first, second)


def encode(schedule: Schedule) -> list[Row]:
    """Return one tuple per step: opcode, queue, record or -1, number of events waited for, those events, payload."""
    return [_encode_step(step) for step in schedule.steps]


def decode(rows: Sequence[Sequence[int]], key: Key, rank: int) -> Schedule:
    """Invert `encode`."""
    return Schedule(key, rank, tuple(_decode_step(row) for row in rows))


def _key(fields: tuple[Any, ...]) -> Key:
    kind, ranks, chunks, contracts, terms, independent, *flags = fields
    return Key(str(kind), int(ranks), int(chunks), tuple(map(bool, contracts)), int(terms), int(independent), *map(bool, flags))


@lru_cache(maxsize=1024)
def _proven(key: Key) -> tuple[tuple[Row, ...], ...]:
    schedules = build_all(key)
    if key.is_channel:
        check_channel(schedules)
    else:
        check_reuse(key, key)
        check_sequence([schedules] * 4)
        check_interleaved(key, key)
    return tuple(tuple(encode(schedule)) for schedule in schedules)


def _encode_step(step: Step) -> Row:
    match step:
        case Copy():
            opcode, payload = COPY, [*_encode_region(step.src), *_encode_region(step.dst)]
        case Signal():
            opcode, payload = SIGNAL, [*_encode_flag(step.flag)]
        case Wait():
            opcode, payload = WAIT, [*_encode_flag(step.flag), step.back]
        case Compute():
            gates = [number for gate in step.gates for number in (*_encode_flag(gate.flag), gate.back)]
            opcode = COMPUTE
            payload = [
                int(step.kind),
                step.index,
                int(step.accumulate),
                *_encode_regions(step.reads),
                *_encode_regions(step.writes),
            ]
            payload += [len(step.gates), *gates]
        case Reduce():
            opcode, payload = REDUCE, [*_encode_regions(step.srcs), *_encode_region(step.dst)]
        case Finish():
            opcode, payload = FINISH, [step.index]
        case Return():
            opcode, payload = RETURN, []
        case Release():
            opcode, payload = RELEASE, _encode_regions(step.reads)
        case Round():
            opcode, payload = ROUND, []
        case _:
            raise ScheduleError("encode", f"the executors cannot run {type(step).__name__}: {show(step)}")
    record = -1 if step.record is None else step.record
    return (opcode, int(step.queue), record, len(step.after), *step.after, *payload)


def _encode_region(region: Region) -> Row:
    lo, hi = region.lo, region.hi
    ends = (lo.numerator, lo.denominator, hi.numerator, hi.denominator)
    return (int(region.buf), region.rank, region.shard, *ends, region.index)


def _encode_regions(regions: tuple[Region, ...]) -> list[int]:
    return [len(regions), *(number for region in regions for number in _encode_region(region))]


def _encode_flag(flag: Flag) -> Row:
    return (int(flag.kind), flag.rank, flag.source, flag.index)


def _decode_step(row: Sequence[int]) -> Step:
    numbers = iter(row)
    opcode, queue, event = next(numbers), Queue(next(numbers)), next(numbers)
    after = tuple(next(numbers) for _ in range(next(numbers)))
    record = None if event < 0 else event
    step: Step
    match opcode:
        case 0:
            step = Copy(queue=queue, after=after, record=record, src=_decode_region(numbers), dst=_decode_region(numbers))
        case 1:
            step = Signal(queue=queue, after=after, record=record, flag=_decode_flag(numbers))
        case 2:
            step = Wait(queue=queue, after=after, record=record, flag=_decode_flag(numbers), back=next(numbers))
        case 3:
            kind, index, accumulate = _compute_kind(next(numbers), row), next(numbers), bool(next(numbers))
            reads, writes = _decode_regions(numbers), _decode_regions(numbers)
            # A gate inside a matmul runs on the matmul's queue.
            gates = tuple(Wait(queue=queue, flag=_decode_flag(numbers), back=next(numbers)) for _ in range(next(numbers)))
            step = Compute(
                queue=queue,
                after=after,
                record=record,
                kind=kind,
                index=index,
                reads=reads,
                writes=writes,
                accumulate=accumulate,
                gates=gates,
            )
        case 4:
            sources = _decode_regions(numbers)
            step = Reduce(queue=queue, after=after, record=record, srcs=sources, dst=_decode_region(numbers))
        case 5:
            step = Finish(queue=queue, after=after, record=record, index=next(numbers))
        case 6:
            step = Return(queue=queue, after=after, record=record)
        case 7:
            step = Release(queue=queue, after=after, record=record, reads=_decode_regions(numbers))
        case 8:
            step = Round(queue=queue, after=after, record=record)
        case _:
            raise ScheduleError("encode", f"opcode {opcode} is unknown, expected 0 to 8, in {tuple(row)}")
    if rest := list(numbers):
        raise ScheduleError("encode", f"{len(rest)} numbers too many in {tuple(row)}")
    return step


def _compute_kind(number: int, row: Sequence[int]) -> ComputeKind:
    try:
        return ComputeKind(number)
    except ValueError:
        known = ", ".join(f"{kind.value} ({kind.name})" for kind in ComputeKind)
        raise ScheduleError("encode", f"compute kind {number} is unknown, expected {known}, in {tuple(row)}") from None


def _decode_region(numbers: Iterator[int]) -> Region:
    buf, rank, shard = Buf(next(numbers)), next(numbers), next(numbers)
    lo, hi = Fraction(next(numbers), next(numbers)), Fraction(next(numbers), next(numbers))
    return Region(buf, rank, shard, lo, hi, next(numbers))


def _decode_regions(numbers: Iterator[int]) -> tuple[Region, ...]:
    return tuple(_decode_region(numbers) for _ in range(next(numbers)))


def _decode_flag(numbers: Iterator[int]) -> Flag:
    return Flag(FlagKind(next(numbers)), next(numbers), next(numbers), next(numbers))

"""Rename the shards and flags of rank 0's program, so that two processes that both run it serve each other.

A push of rank 0 of 4 to rank 3, and its flag:

    INPUT[0] -> rank 3, LANDING[0]     signal rank 3, READY of source 0        as rank 0 of 4
    INPUT[0] -> rank 3, LANDING[1]     signal rank 3, READY of source 1        mirrored; "rank 3" is the other process

The other process awaits READY of source 1 first, and then reads LANDING[1]. DONE is renamed alike: a process that pushes to
rank p waits for DONE of source p, which the other one sends to rank R - p behind its last read of LANDING[p]. The same renaming
maps the READY words that an owner clears before DONE (csrc/cuda/waits.cu): it clears those of source p and signals rank p,
which is DONE of source R - p there, and frees the push to rank R - p that writes these very words.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

from ub_overlap.runtime.ops.schedule_provider import ScheduleProvider
from ub_overlap.runtime.schedule.encode import decode, encode
from ub_overlap.runtime.schedule.steps import Flag, Key, Region, Schedule


def source_at(peer: int, ranks: int) -> int:
    """Return the rank that this process is for the other one, as which it pushes to `peer`."""
    return (ranks - peer) % ranks


def mirror(schedule: Schedule) -> Schedule:
    """Return the program of rank 0 for a group whose other ranks are all one process that runs the same program.

    ValueError for the program of another rank, and for a push of another shard than this rank's own.
    """
    if schedule.rank != 0:
        raise ValueError(f"mirror the program of rank 0, got rank {schedule.rank}")
    return replace(schedule, steps=tuple(_renamed(step, schedule.key.ranks) for step in schedule.steps))


def _renamed(value: Any, ranks: int) -> Any:
    """Return a step, or a part of one, with every region and flag in a peer's memory renamed."""
    if isinstance(value, tuple):
        return tuple(_renamed(item, ranks) for item in value)
    if isinstance(value, Region):
        if value.rank == 0:
            return value
        if not value.buf.in_arena or value.shard != 0:
            raise ValueError(f"rank 0 writes only its own shard at a peer, in an arena: got {value}")
        return replace(value, shard=source_at(value.rank, ranks))
    if isinstance(value, Flag):
        return value if value.rank == 0 else replace(value, source=source_at(value.rank, ranks))
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: _renamed(getattr(value, field.name), ranks) for field in fields(value)})
    return value


class MirrorProvider:
    """Gives C++ mirrored schedules. The schedules of the real group are built and proven first, as always."""

    def __init__(self) -> None:
        self._proven = ScheduleProvider()

    def __call__(self, key: tuple[Any, ...], rank: int) -> list[tuple[int, ...]]:
        """Return the encoded steps of `rank` for `key`, a `Key` as a plain tuple."""
        kind, ranks, chunks, contracts, *rest = key
        typed = Key(kind, ranks, chunks, tuple(contracts), *rest)
        return encode(mirror(decode(self._proven(key, rank), typed, rank)))

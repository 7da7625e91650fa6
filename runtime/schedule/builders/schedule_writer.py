"""What all builders share: cutting shards into pieces, batching shards into matmuls, and a list of steps under way.

Legend: R ranks; r the rank the schedule is for; a *ring order* is the order in which r meets its peers; a *batch* is some
shards that one wait (gathers) or one matmul (scatters) takes together; a *run* is a maximal set of shards of a batch that
lie side by side in memory, so that one matmul can take them as one matrix.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from fractions import Fraction

from ..steps import Copy, Flag, FlagKind, Key, Queue, Region, Schedule, Signal, Step, Wait

SLOTS = 2
"""Arena slots, taken in turn: a call's DONE waits look this many epochs back."""


def pieces(key: Key) -> list[tuple[Fraction, Fraction]]:
    """The intervals a shard is cut into: ceil(chunks / R) equal ones, or one where chunks <= R. Striped: chunks, or R."""
    count = key.chunks or key.ranks if key.striped else max(1, -(-key.chunks // key.ranks))
    return [(Fraction(i, count), Fraction(i + 1, count)) for i in range(count)]


def split(items: Sequence[int], parts: int) -> list[Sequence[int]]:
    """`items` cut into `parts` consecutive, nearly equal batches; the longer ones first, because what comes last is the
    tail that nothing hides. Never more batches than items."""
    parts = max(1, min(parts, len(items)))
    size, longer = divmod(len(items), parts)
    batches, at = [], 0
    for i in range(parts):
        step = size + (i < longer)
        batches.append(items[at : at + step])
        at += step
    return [batch for batch in batches if batch]


def runs(batch: Sequence[int]) -> list[list[int]]:
    """Maximal runs of neighbouring shards, in the order in which the batch first meets them: (6, 7, 0) -> [6, 7], [0]."""
    found: list[list[int]] = []
    for shard in sorted(batch):
        if found and found[-1][-1] == shard - 1:
            found[-1].append(shard)
        else:
            found.append([shard])
    return sorted(found, key=lambda run: min(batch.index(shard) for shard in run))


class ScheduleWriter:
    """A schedule being written: steps in issue order and a counter of events."""

    def __init__(self, key: Key, rank: int) -> None:
        self.key = key
        self.rank = rank
        self.steps: list[Step] = []
        self._events = 0

    @property
    def peers_down(self) -> list[int]:
        """r-1, r-2, ...: the order in which shards are pushed, so that rank q meets them as q+1, q+2, ... and every
        receiver has one sender at a time."""
        return [(self.rank - i) % self.key.ranks for i in range(1, self.key.ranks)]

    @property
    def peers_up(self) -> list[int]:
        """r+1, r+2, ...: the order in which gathered shards arrive, and in which scattered ones are computed."""
        return [(self.rank + i) % self.key.ranks for i in range(1, self.key.ranks)]

    def event(self) -> int:
        """A fresh event number for some step to record."""
        self._events += 1
        return self._events - 1

    def add(self, step: Step) -> None:
        self.steps.append(step)

    def wait(self, kind: FlagKind, source: int, index: int = 0) -> None:
        """COMPUTE waits for a flag of this very call."""
        self.add(Wait(queue=Queue.COMPUTE, flag=Flag(kind, self.rank, source, index)))

    def wait_slot_free(self, peer: int) -> None:
        """COPY waits until `peer` has read what its slot held before, two calls ago."""
        self.add(Wait(queue=Queue.COPY, flag=Flag(FlagKind.DONE, self.rank, peer), back=SLOTS))

    def push(self, src: Region, dst: Region, kind: FlagKind, index: int, after: tuple[int, ...] = ()) -> None:
        """Write a piece into a peer's landing area, then tell the peer."""
        self.add(Copy(queue=Queue.COPY, src=src, dst=dst, after=after))
        self.add(Signal(queue=Queue.COPY, flag=Flag(kind, dst.rank, self.rank, index)))

    def local_copy(self, src: Region, dst: Region) -> None:
        self.add(Copy(queue=Queue.COMPUTE, src=src, dst=dst))

    def close(self) -> Schedule:
        """The tail of every op: once this rank's pushes have ended (the op returns then and its inputs are freed), tell
        every peer that this slot has been read. The join sits before all DONEs, so an executor can write them at once."""
        copies = [i for i, step in enumerate(self.steps) if step.queue is Queue.COPY]
        after: tuple[int, ...] = ()
        if copies:
            last = self.steps[copies[-1]]
            joined = self.event() if last.record is None else last.record
            self.steps[copies[-1]] = replace(last, record=joined)
            after = (joined,)
        for peer in self.peers_down:
            self.add(Signal(queue=Queue.COMPUTE, flag=Flag(FlagKind.DONE, peer, self.rank), after=after))
            after = ()
        return Schedule(self.key, self.rank, tuple(self.steps))


def regions(make: Region, shards: Iterable[int]) -> tuple[Region, ...]:
    """`make`, once a shard."""
    return tuple(replace(make, shard=shard) for shard in shards)

"""Helpers of all builders: cut shards into pieces, batch shards into matmuls, and write a list of steps.

Legend: R ranks; r the rank of the schedule; a *ring order* is the order in which r communicates with its peers; a *batch* is
the shards of one wait (gathers) or one matmul (scatters); a *run* is a maximal set of shards of a batch that are adjacent in
memory, so that one matmul can use them as one matrix.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from fractions import Fraction

from ..steps import Buf, Compute, Copy, Flag, FlagKind, Key, Queue, Region, Return, Schedule, Signal, Step, Wait


def pieces(key: Key) -> list[tuple[Fraction, Fraction]]:
    """Return the intervals of a shard: ceil(chunks / R) equal ones, or one where chunks <= R. Striped: chunks, or R."""
    count = key.chunks or key.ranks if key.striped else max(1, -(-key.chunks // key.ranks))
    return [(Fraction(i, count), Fraction(i + 1, count)) for i in range(count)]


def split(items: Sequence[int], parts: int) -> list[Sequence[int]]:
    """Cut `items` into `parts` consecutive, nearly equal batches, never more than items.

    The longer ones are first, because the last one is the exposed tail.
    """
    parts = max(1, min(parts, len(items)))
    size, longer = divmod(len(items), parts)
    batches, at = [], 0
    for i in range(parts):
        step = size + (i < longer)
        batches.append(items[at : at + step])
        at += step
    return [batch for batch in batches if batch]


def runs(batch: Sequence[int]) -> list[list[int]]:
    """Return maximal runs of adjacent shards, in the order of their first shard in the batch: (6, 7, 0) -> [6, 7], [0]."""
    adjacent: list[list[int]] = []
    for shard in sorted(batch):
        if adjacent and adjacent[-1][-1] == shard - 1:
            adjacent[-1].append(shard)
        else:
            adjacent.append([shard])
    return sorted(adjacent, key=lambda run: min(batch.index(shard) for shard in run))


class ScheduleWriter:
    """A schedule being written: steps in issue order and a counter of events."""

    def __init__(self, key: Key, rank: int) -> None:
        self.key = key
        self.rank = rank
        self.steps: list[Step] = []
        self._events = 0

    @property
    def peers_down(self) -> list[int]:
        """r-1, r-2, ...: the push order. Rank q then receives from q+1, q+2, ..., from one sender at a time."""
        return [(self.rank - i) % self.key.ranks for i in range(1, self.key.ranks)]

    @property
    def peers_up(self) -> list[int]:
        """r+1, r+2, ...: the order in which gathered shards arrive and scattered shards are computed."""
        return [(self.rank + i) % self.key.ranks for i in range(1, self.key.ranks)]

    def event(self) -> int:
        """Return a new event number for a step to record."""
        self._events += 1
        return self._events - 1

    def add(self, step: Step) -> None:
        """Append a step."""
        self.steps.append(step)

    def wait(
        self, kind: FlagKind, source: int, index: int = 0, record: int | None = None, queue: Queue = Queue.COMPUTE
    ) -> None:
        """Make a queue wait for a flag of this call."""
        self.add(Wait(queue=queue, flag=Flag(kind, self.rank, source, index), record=record))

    def wait_slot_free(self, peer: int, queue: Queue = Queue.COPY) -> None:
        """Make `queue` wait until `peer` has read its slot's previous contents."""
        self.add(Wait(queue=queue, flag=Flag(FlagKind.DONE, self.rank, peer), back=self.key.slot_distance))

    def signal(self, queue: Queue, kind: FlagKind, peer: int, index: int = 0) -> None:
        """Tell `peer` that everything before this step on `queue` is in its memory."""
        self.add(Signal(queue=queue, flag=Flag(kind, peer, self.rank, index)))

    def push(self, src: Region, dst: Region, kind: FlagKind, index: int, after: tuple[int, ...] = ()) -> None:
        """Write a piece into a peer's landing area, then signal the peer."""
        self.add(Copy(queue=Queue.COPY, src=src, dst=dst, after=after))
        self.signal(Queue.COPY, kind, dst.rank, index)

    def push_shard(self) -> None:
        """Push the pieces of this rank's shard of a gather to all peers."""
        for peer in self.peers_down:
            self.wait_slot_free(peer)
            for index, (lo, hi) in enumerate(pieces(self.key)):
                src, dst = Region(Buf.INPUT, self.rank, self.rank, lo, hi), Region(Buf.LANDING, peer, self.rank, lo, hi)
                self.push(src, dst, FlagKind.READY, index)

    def local_copy(
        self,
        src: Region,
        dst: Region,
        queue: Queue = Queue.COMPUTE,
        after: tuple[int, ...] = (),
        record: int | None = None,
    ) -> None:
        """Copy within this rank's memory."""
        self.add(Copy(queue=queue, src=src, dst=dst, after=after, record=record))

    def independent_matmuls(self) -> None:
        """Add the matmuls that are independent of the collective, each as a whole."""
        for index in self.key.independent_indices:
            result = Region(Buf.RESULT, self.rank, 0, index=index)
            self.add(Compute(queue=Queue.COMPUTE, index=index, reads=(), writes=(result,)))

    def split(self, after: tuple[int, ...] = ()) -> None:
        """End the steps of one op of a split collective. The next ones are those of its next op."""
        self.add(Return(queue=Queue.COMPUTE, after=after))

    def join(self) -> tuple[int, ...]:
        """Return the event after which this rank's COPY steps so far have ended, none without such steps."""
        copies = [i for i, step in enumerate(self.steps) if step.queue is Queue.COPY]
        if not copies:
            return ()
        last = self.steps[copies[-1]]
        joined = self.event() if last.record is None else last.record
        self.steps[copies[-1]] = replace(last, record=joined)
        return (joined,)

    def close(self) -> Schedule:
        """Add the tail of every op and return the schedule.

        COMPUTE waits until this rank's pushes have ended (the op then returns and its inputs are freed). Then it signals to
        every peer that this slot has been read. The join is before all DONEs, so an executor can write them in one step. The
        finish of a zero-copy gather has joined already.
        """
        after = () if self.key.zero_copy else self.join()
        for peer in self.peers_down:
            self.add(Signal(queue=Queue.COMPUTE, flag=Flag(FlagKind.DONE, peer, self.rank), after=after))
            after = ()
        return Schedule(self.key, self.rank, tuple(self.steps))


def regions(template: Region, shards: Iterable[int]) -> tuple[Region, ...]:
    """Return `template` once per shard."""
    return tuple(replace(template, shard=shard) for shard in shards)

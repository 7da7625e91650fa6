"""all_to_all: every rank pushes a piece to each peer, of a size that only the two ranks of the piece know.

The landing memory of a slot has one *area* for each source, of a size that all ranks know. A piece that is larger than its area
is sent in *rounds*: the destination copies a round out and signals READY2, and the source pushes the next one. Both compute the
number of rounds from the size of the piece. Every piece has a first round, even one without rows. Rank 1 of 4::

    COPY      push to 0   push to 3   push to 2              | wait READY2 of 3   push round 1 to 3
    COMPUTE   start | other ops ... | finish: own piece, waits, copies | READY2 to 0   wait round 1 of 0, copy | DONE to all

A round waits only for the round before, so rounds end in order, whatever the sizes of the other pieces are.

`Round` steps separate the rounds. A key has `chunks` rounds (at least one) for all pieces. Executors take the steps of two:
they repeat those of the second round, and leave out pieces that have ended.

A finish with an order puts all rows into the result at once, between the last copy and the first DONE. Its copies to OUTPUT
are left out, or go to other memory where there are several rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from ..steps import Buf, FlagKind, Key, Queue, Region, Round, Schedule
from .schedule_writer import ScheduleWriter

Rounds = Callable[[int, int], int]
"""Rounds of the piece from a source to a destination, 1 or more."""


def build(key: Key, rank: int, rounds: Rounds | None = None) -> Schedule:
    """Build the schedule of `rank`. `rounds`: those of each piece (default: of the key)."""
    of = rounds if rounds is not None else lambda _source, _destination: max(1, key.chunks)
    writer = ScheduleWriter(key, rank)
    for peer in writer.peers_down:
        writer.wait_slot_free(peer)
        _push(writer, peer, 0, of(rank, peer))
    writer.split()
    writer.local_copy(Region(Buf.INPUT, rank, rank), Region(Buf.OUTPUT, rank, rank))
    for source in writer.peers_up:
        _receive(writer, source, 0, of(source, rank))
    last = max((max(of(rank, peer), of(peer, rank)) for peer in writer.peers_up), default=1)
    for number in range(1, last):
        writer.add(Round(queue=Queue.COMPUTE))
        sources = [peer for peer in writer.peers_up if of(peer, rank) > number]
        for source in sources:
            writer.signal(Queue.COMPUTE, FlagKind.READY2, source, number)
        for peer in writer.peers_down:
            if of(rank, peer) > number:
                writer.wait(FlagKind.READY2, peer, number, queue=Queue.COPY)
                _push(writer, peer, number, of(rank, peer))
        for source in sources:
            _receive(writer, source, number, of(source, rank))
    if last > 1:
        writer.add(Round(queue=Queue.COMPUTE))
    return writer.close()


def _push(writer: ScheduleWriter, peer: int, number: int, count: int) -> None:
    """Push round `number` of `count` of the piece for `peer` into this rank's area there."""
    cut = Fraction(number, count), Fraction(number + 1, count)
    area = Region(Buf.LANDING, peer, writer.rank, *cut, number)
    writer.push(Region(Buf.INPUT, writer.rank, peer, *cut), area, FlagKind.READY, number)


def _receive(writer: ScheduleWriter, source: int, number: int, count: int) -> None:
    """Wait for round `number` of `count` of the piece from `source`, and copy it out."""
    cut = Fraction(number, count), Fraction(number + 1, count)
    writer.wait(FlagKind.READY, source, number)
    area = Region(Buf.LANDING, writer.rank, source, *cut, number)
    writer.local_copy(area, Region(Buf.OUTPUT, writer.rank, source, *cut))

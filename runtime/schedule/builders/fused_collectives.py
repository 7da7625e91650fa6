"""Fused collectives of few tokens: every step is on COMPUTE, in one kernel on CUDA.

One-shot: every rank pushes its data to all peers, and each sums all of it::

    COMPUTE   push to 2, 3, 0   READY to 2, 3, 0   wait all   sum, or copies

Two-shot (all_reduce): a small reduce_scatter, then an all_gather of the sums::

    COMPUTE   push shards to 2, 3, 0   READY   wait all   sum own   push the sum to 2, 3, 0   READY2   wait all   copies

No rank signals DONE. A rank that has seen READY of all peers for epoch e - 1 knows that they have left epoch e - 2, whose slot
epoch e uses again: the steps of a rank are in one order. So the two slots of fused collectives must be used in turn, and by
nothing else. On CUDA each block of threads runs these steps for its slice, with flags and epochs of its own.
"""

from __future__ import annotations

from ..steps import Buf, Copy, FlagKind, Key, Queue, Reduce, Region, Schedule
from .reduction_phases import collect
from .schedule_writer import ScheduleWriter


def build_all_gather(key: Key, rank: int) -> Schedule:
    """Build the schedule of `rank` for a "one_shot_all_gather" key."""
    writer = ScheduleWriter(key, rank)
    for peer in writer.peers_up:
        _push(writer, Region(Buf.INPUT, rank, rank), Region(Buf.LANDING, peer, rank))
    _signal(writer, FlagKind.READY)
    writer.local_copy(Region(Buf.INPUT, rank, rank), Region(Buf.OUTPUT, rank, rank))
    collect(writer, Buf.LANDING, FlagKind.READY)
    return Schedule(key, rank, tuple(writer.steps))


def build_reduce_scatter(key: Key, rank: int) -> Schedule:
    """Build the schedule of `rank` for a "one_shot_reduce_scatter" key."""
    writer = ScheduleWriter(key, rank)
    _scatter(writer)
    _sum_own(writer, 0)
    return Schedule(key, rank, tuple(writer.steps))


def build_one_shot_all_reduce(key: Key, rank: int) -> Schedule:
    """Build the schedule of `rank` for a "one_shot_all_reduce" key."""
    writer, shards = ScheduleWriter(key, rank), range(key.ranks)
    for peer in writer.peers_up:
        for shard in shards:
            _push(writer, Region(Buf.INPUT, rank, shard), Region(Buf.LANDING, peer, rank, index=shard))
    _signal(writer, FlagKind.READY)
    for peer in writer.peers_up:
        writer.wait(FlagKind.READY, peer)
    for shard in shards:
        sources = tuple(
            Region(Buf.INPUT, rank, shard) if source == rank else Region(Buf.LANDING, rank, source, index=shard)
            for source in range(key.ranks)
        )
        writer.add(Reduce(queue=Queue.COMPUTE, srcs=sources, dst=Region(Buf.OUTPUT, rank, shard)))
    return Schedule(key, rank, tuple(writer.steps))


def build_two_shot_all_reduce(key: Key, rank: int) -> Schedule:
    """Build the schedule of `rank` for a "two_shot_all_reduce" key."""
    writer = ScheduleWriter(key, rank)
    _scatter(writer)
    _sum_own(writer, rank)
    for peer in writer.peers_up:
        _push(writer, Region(Buf.OUTPUT, rank, rank), Region(Buf.LANDING2, peer, rank))
    _signal(writer, FlagKind.READY2)
    collect(writer, Buf.LANDING2, FlagKind.READY2)
    return Schedule(key, rank, tuple(writer.steps))


def _push(writer: ScheduleWriter, src: Region, dst: Region) -> None:
    writer.add(Copy(queue=Queue.COMPUTE, src=src, dst=dst))


def _signal(writer: ScheduleWriter, kind: FlagKind) -> None:
    for peer in writer.peers_up:
        writer.signal(Queue.COMPUTE, kind, peer)


def _scatter(writer: ScheduleWriter) -> None:
    """Push the shards of INPUT to their owners."""
    for owner in writer.peers_up:
        _push(writer, Region(Buf.INPUT, writer.rank, owner), Region(Buf.LANDING, owner, writer.rank))
    _signal(writer, FlagKind.READY)


def _sum_own(writer: ScheduleWriter, shard: int) -> None:
    """Wait for all peers, and sum this rank's shard into OUTPUT shard `shard`."""
    rank = writer.rank
    for peer in writer.peers_up:
        writer.wait(FlagKind.READY, peer)
    sources = tuple(Region(Buf.INPUT if source == rank else Buf.LANDING, rank, source) for source in range(writer.key.ranks))
    writer.add(Reduce(queue=Queue.COMPUTE, srcs=sources, dst=Region(Buf.OUTPUT, rank, shard)))

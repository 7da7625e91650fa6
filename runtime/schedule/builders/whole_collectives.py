"""bulk and split: a full collective on the copy queue, concurrent with work that is independent of it.

::

    bulk    COPY      push to 0   push to 3   push to 2
            COMPUTE   mm 0 ....... mm 1 ................   wait, copy or reduce   done

    split   COPY      push to 0   push to 3   push to 2
            COMPUTE   start | other ops, other calls of the group ... | finish: wait, copy or reduce   done

All pushes are issued first: they need no result of this call. Then the landed shards are copied to the result (all_gather),
reduced (reduce_scatter), or reduced and shared (all_reduce). By then they have usually arrived.

Between them bulk computes matmuls of its own call. A split collective is two ops, start and finish, with any work between
them: start issues the pushes and returns, and waits for nothing of this call. It has landing memory and flags of its own, its
split slot. So calls between start and finish share nothing with it but the COPY queue.

A zero-copy gather returns its landing memory. Start copies the own shard there, behind the pushes, so that peers do not wait
for it. A third op, release, frees the slot once the result has been read::

            COPY      push to 0   push to 3   push to 2   own shard
            COMPUTE   start | other ... | finish: wait | readers of the result, other ... | release: done

An all_reduce pushes its reduced shards last, because they need the peers' shards. So only the first phase of a split one is
hidden.
"""

from __future__ import annotations

from ..steps import Buf, FlagKind, Key, Queue, Region, Release, Schedule
from .reduction_phases import collect, reduce_own, scatter_input
from .schedule_writer import ScheduleWriter, pieces, regions


def build_all_gather(key: Key, rank: int) -> Schedule:
    """Build the schedule of `rank` for a "bulk_all_gather" or "split_all_gather" key."""
    writer = ScheduleWriter(key, rank)
    writer.push_shard()
    if key.zero_copy:
        return _end_in_place(writer)
    _add_middle(writer)
    writer.local_copy(Region(Buf.INPUT, rank, rank), Region(Buf.OUTPUT, rank, rank))
    collect(writer, Buf.LANDING, FlagKind.READY)
    return writer.close()


def _end_in_place(writer: ScheduleWriter) -> Schedule:
    """Copy the own shard to its place, and add what follows the pushes of a zero-copy gather."""
    rank = writer.rank
    writer.local_copy(Region(Buf.INPUT, rank, rank), Region(Buf.LANDING, rank, rank), Queue.COPY)
    writer.split()
    for source in writer.peers_up:
        for index in range(len(pieces(writer.key))):
            writer.wait(FlagKind.READY, source, index)
    writer.split(after=writer.join())
    writer.add(Release(queue=Queue.COMPUTE, reads=regions(Region(Buf.LANDING, rank, 0), range(writer.key.ranks))))
    return writer.close()


def build_reduce_scatter(key: Key, rank: int) -> Schedule:
    """Build the schedule of `rank` for a "bulk_reduce_scatter" or "split_reduce_scatter" key."""
    writer = ScheduleWriter(key, rank)
    scatter_input(writer)
    _add_middle(writer)
    reduce_own(writer, Buf.INPUT, 0, share=False)
    return writer.close()


def build_all_reduce(key: Key, rank: int) -> Schedule:
    """Build the schedule of `rank` for a "bulk_all_reduce" or "split_all_reduce" key."""
    writer = ScheduleWriter(key, rank)
    scatter_input(writer)
    _add_middle(writer)
    reduce_own(writer, Buf.INPUT, rank, share=True)
    collect(writer, Buf.LANDING2, FlagKind.READY2)
    return writer.close()


def _add_middle(writer: ScheduleWriter) -> None:
    """Add what lies between the pushes and the rest: the matmuls of bulk, or the end of a start."""
    if writer.key.is_split:
        writer.split()
    else:
        writer.independent_matmuls()

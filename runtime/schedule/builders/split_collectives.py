"""split: a collective as two ops, start and finish, with any work between them.

::

    COPY      push to 0   push to 3   push to 2
    COMPUTE   start | other ops, other calls of the group ... | finish: wait, copy or reduce   done

Start issues the pushes and returns: it waits for nothing of this call. Finish is the rest of the bulk schedule. A split
collective has landing memory and flags of its own, its split slot. So calls between start and finish share nothing with it but
the COPY queue.

An all_reduce pushes its reduced shards within finish, because they need the peers' shards. Only its first phase is hidden.
"""

from __future__ import annotations

from ..steps import Buf, FlagKind, Key, Region, Schedule
from .reduction_phases import collect, reduce_own, scatter_input
from .schedule_writer import ScheduleWriter


def build_all_gather(key: Key, rank: int) -> Schedule:
    """Build the schedule of `rank` for a "split_all_gather" key."""
    writer = ScheduleWriter(key, rank)
    writer.push_shard()
    writer.split()
    writer.local_copy(Region(Buf.INPUT, rank, rank), Region(Buf.OUTPUT, rank, rank))
    collect(writer, Buf.LANDING, FlagKind.READY)
    return writer.close()


def build_reduce_scatter(key: Key, rank: int) -> Schedule:
    """Build the schedule of `rank` for a "split_reduce_scatter" key."""
    writer = ScheduleWriter(key, rank)
    scatter_input(writer)
    writer.split()
    reduce_own(writer, Buf.INPUT, 0, share=False)
    return writer.close()


def build_all_reduce(key: Key, rank: int) -> Schedule:
    """Build the schedule of `rank` for a "split_all_reduce" key."""
    writer = ScheduleWriter(key, rank)
    scatter_input(writer)
    writer.split()
    reduce_own(writer, Buf.INPUT, rank, share=True)
    collect(writer, Buf.LANDING2, FlagKind.READY2)
    return writer.close()

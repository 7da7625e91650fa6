"""bulk: a full collective on the copy queue, concurrent with independent matmuls.

::

    COPY      push to 0   push to 3   push to 2
    COMPUTE   mm 0 ....... mm 1 ................   wait, copy or reduce   done

All pushes are issued before the first matmul: they need no result of this call. After the matmuls the landed shards are copied
to the result (all_gather), reduced (reduce_scatter), or reduced and shared (all_reduce). By then they have usually arrived.
"""

from __future__ import annotations

from ..steps import Buf, FlagKind, Key, Region, Schedule
from .reduction_phases import collect, reduce_own, scatter_input
from .schedule_writer import ScheduleWriter


def build_all_gather(key: Key, rank: int) -> Schedule:
    """Build the schedule of `rank` for a "bulk_all_gather" key."""
    writer = ScheduleWriter(key, rank)
    writer.push_shard()
    writer.independent_matmuls()
    writer.local_copy(Region(Buf.INPUT, rank, rank), Region(Buf.OUTPUT, rank, rank))
    collect(writer, Buf.LANDING, FlagKind.READY)
    return writer.close()


def build_reduce_scatter(key: Key, rank: int) -> Schedule:
    """Build the schedule of `rank` for a "bulk_reduce_scatter" key."""
    writer = ScheduleWriter(key, rank)
    scatter_input(writer)
    writer.independent_matmuls()
    reduce_own(writer, Buf.INPUT, 0, share=False)
    return writer.close()


def build_all_reduce(key: Key, rank: int) -> Schedule:
    """Build the schedule of `rank` for a "bulk_all_reduce" key."""
    writer = ScheduleWriter(key, rank)
    scatter_input(writer)
    writer.independent_matmuls()
    reduce_own(writer, Buf.INPUT, rank, share=True)
    collect(writer, Buf.LANDING2, FlagKind.READY2)
    return writer.close()

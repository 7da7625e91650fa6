"""matmul -> all_reduce: a reduce_scatter whose owners push each reduced piece to all peers at once.

The two phases use two landing areas, so the second needs no wait for a free slot. Every rank ends with the same bits: each
shard is summed once, by its owner, in rank order. Independent matmuls run while the reduced pieces are shared: the first phase
is already concurrent with the op's own matmuls.
"""

from __future__ import annotations

from ..steps import Buf, FlagKind, Key, Schedule
from .reduction_phases import collect, reduce_own, scatter_products
from .schedule_writer import ScheduleWriter


def build(key: Key, rank: int) -> Schedule:
    """Build the schedule of `rank` for a "matmul_all_reduce" key."""
    writer = ScheduleWriter(key, rank)
    reduce_own(writer, scatter_products(writer), rank, share=True)
    writer.independent_matmuls()
    collect(writer, Buf.LANDING2, FlagKind.READY2)
    return writer.close()

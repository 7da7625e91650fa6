"""matmul -> all_reduce: a reduce_scatter whose owners share each reduced piece at once.

The two phases use two landing areas, so the second needs no wait of its own for a free slot, and every rank ends with the
same bits: each shard is summed once, by its owner, in rank order.
"""

from __future__ import annotations

from ..steps import Buf, FlagKind, Key, Schedule
from .reduction_phases import collect, reduce_own, scatter_products
from .schedule_writer import ScheduleWriter


def build(key: Key, rank: int) -> Schedule:
    """The schedule of `rank` for a "matmul_all_reduce" key."""
    script = ScheduleWriter(key, rank)
    scatter_products(script)
    reduce_own(script, Buf.PARTIAL, rank, share=True)
    collect(script, Buf.LANDING2, FlagKind.READY2)
    return script.close()

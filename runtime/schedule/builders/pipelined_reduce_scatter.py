"""matmul -> reduce_scatter: a shard of the product travels to its owner while the next one is computed.

Own shard last: it crosses no link, and the peers' shards land while it is computed. With chunks < R neighbouring shards are
one matmul (fewer, larger matmuls) but are still pushed one by one, because they go to different ranks.
"""

from __future__ import annotations

from ..steps import Buf, Key, Schedule
from .reduction_phases import reduce_own, scatter_products
from .schedule_writer import ScheduleWriter


def build(key: Key, rank: int) -> Schedule:
    """The schedule of `rank` for a "matmul_reduce_scatter" key."""
    script = ScheduleWriter(key, rank)
    scatter_products(script)
    reduce_own(script, Buf.PARTIAL, 0, share=False)
    return script.close()

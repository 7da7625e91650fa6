"""matmul -> reduce_scatter: a shard of the product is pushed to its owner while the next one is computed.

The own shard is last: it crosses no link, and the peers' shards land while it is computed. With chunks < R adjacent shards are
one matmul (fewer, larger matmuls) but are still pushed one by one, because they go to different ranks. A direct key pushes
nothing: its one matmul stores every shard at its owner.

Independent matmuls run before the wait for the peers' shards, so that the last pushes are not exposed.
"""

from __future__ import annotations

from ..steps import Key, Schedule
from .reduction_phases import reduce_own, scatter_products
from .schedule_writer import ScheduleWriter


def build(key: Key, rank: int) -> Schedule:
    """Build the schedule of `rank` for a "matmul_reduce_scatter" key."""
    writer = ScheduleWriter(key, rank)
    own = scatter_products(writer)
    writer.independent_matmuls()
    reduce_own(writer, own, 0, share=False)
    return writer.close()

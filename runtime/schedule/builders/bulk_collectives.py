"""bulk: a whole collective on the copy queue, beside matmuls that have nothing to do with it.

::

    COPY      push to 0   push to 3   push to 2
    COMPUTE   mm 0 ....... mm 1 ................   wait, copy or reduce   done

All pushes are issued before the first matmul: they need nothing that this call computes. What lands is copied to the result
(all_gather), reduced (reduce_scatter), or reduced and shared (all_reduce) after the matmuls, when it has long arrived.
"""

from __future__ import annotations

from ..steps import Buf, Compute, FlagKind, Key, Queue, Region, Schedule
from .reduction_phases import collect, reduce_own, scatter_input
from .schedule_writer import ScheduleWriter, pieces


def build_all_gather(key: Key, rank: int) -> Schedule:
    """The schedule of `rank` for a "bulk_all_gather" key."""
    script = ScheduleWriter(key, rank)
    for peer in script.peers_down:
        script.wait_slot_free(peer)
        for index, (lo, hi) in enumerate(pieces(key)):
            mine, there = Region(Buf.INPUT, rank, rank, lo, hi), Region(Buf.LANDING, peer, rank, lo, hi)
            script.push(mine, there, FlagKind.READY, index)
    _independent_matmuls(script)
    script.local_copy(Region(Buf.INPUT, rank, rank), Region(Buf.OUTPUT, rank, rank))
    collect(script, Buf.LANDING, FlagKind.READY)
    return script.close()


def build_reduce_scatter(key: Key, rank: int) -> Schedule:
    """The schedule of `rank` for a "bulk_reduce_scatter" key."""
    script = ScheduleWriter(key, rank)
    scatter_input(script)
    _independent_matmuls(script)
    reduce_own(script, Buf.INPUT, 0, share=False)
    return script.close()


def build_all_reduce(key: Key, rank: int) -> Schedule:
    """The schedule of `rank` for a "bulk_all_reduce" key."""
    script = ScheduleWriter(key, rank)
    scatter_input(script)
    _independent_matmuls(script)
    reduce_own(script, Buf.INPUT, rank, share=True)
    collect(script, Buf.LANDING2, FlagKind.READY2)
    return script.close()


def _independent_matmuls(script: ScheduleWriter) -> None:
    for index in range(script.key.terms):
        result = Region(Buf.RESULT, script.rank, 0, index=index)
        script.add(Compute(queue=Queue.COMPUTE, index=index, reads=(), writes=(result,)))

"""Schedule of a piece of a message from rank 0, the source of a channel, to rank 1, its destination.

    source         wait for DONE of the piece that used the slot before | copy INPUT to LANDING | signal READY
    destination    wait for READY | copy LANDING to OUTPUT | signal DONE

The epochs are the numbers of the pieces, and slot = epoch modulo the channel's slots. Both ends have a queue of their own.
"""

from __future__ import annotations

from ..steps import Buf, Copy, Flag, FlagKind, Key, Queue, Region, Schedule, Signal, Step, Wait

SOURCE, DESTINATION = 0, 1


def build(key: Key, rank: int) -> Schedule:
    """Build the schedule of one end."""
    ready = Flag(FlagKind.READY, DESTINATION, SOURCE)
    done = Flag(FlagKind.DONE, SOURCE, DESTINATION)
    landing = Region(Buf.LANDING, DESTINATION, SOURCE)
    steps: tuple[Step, ...]
    if rank == SOURCE:
        steps = (
            Wait(queue=Queue.COPY, flag=done, back=key.chunks),
            Copy(queue=Queue.COPY, src=Region(Buf.INPUT, SOURCE, SOURCE), dst=landing),
            Signal(queue=Queue.COPY, flag=ready),
        )
    else:
        steps = (
            Wait(queue=Queue.COPY, flag=ready),
            Copy(queue=Queue.COPY, src=landing, dst=Region(Buf.OUTPUT, DESTINATION, SOURCE)),
            Signal(queue=Queue.COPY, flag=done),
        )
    return Schedule(key, rank, steps)

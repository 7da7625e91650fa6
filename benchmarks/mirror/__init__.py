"""Mirror mode: time a group of R ranks on two GPUs.

Both processes run the program of rank 0 of R. The other process stands for all ranks 1 to R-1: what rank 0 pushes to rank p
lands there as the shard of rank (R - p) mod R. Rank 0 pushes to p = R-1, R-2, ..., 1 and consumes from q = 1, 2, ..., R-1. So
the i-th push of one process is the i-th shard that the other one awaits, as in the ring of R ranks.

    schedule.py       the program of rank 0 with shards and flags renamed, a pure function
    arena.py          the memory: pointers of ranks 1 to R-1 are those of the other process
    group.py          a c10d group of R ranks in two processes, and its session
    collectives.py    the plain result of such a group, for comparison
"""

from __future__ import annotations

PROCESSES = 2


def note(ranks: int) -> str:
    """Return the sentence that heads every table of this mode."""
    return (
        f"Mirror of {ranks} ranks on {PROCESSES} GPUs: each GPU runs the program of rank 0, and the other GPU stands for ranks "
        f"1 to {ranks - 1}. Times are those of {ranks} ranks, without their skew and without incast. Results are not those of "
        f"{ranks} ranks. There are no NCCL rows, and collectives that are left alone do not communicate."
    )

"""The two phases that reductions are made of, shared by the scatter, all_reduce and bulk builders.

Scatter: every rank computes the shards of its partial product up the ring, own shard last, and pushes each to its owner as
soon as it is there; the owner sums all ranks' shards in rank order, in fp32. Rank 1 of 4::

    COMPUTE   mm(2)   mm(3)      mm(0)      mm(own 1)   wait all, reduce
    COPY              push to 2  push to 3  push to 0

Striped, every matmul makes one piece of all shards (R blocks of rows, one batched matmul), so each is a small reduce_scatter of
its own: the last one's pushes have nothing to hide behind, but all earlier pieces are summed meanwhile. Rank 1 of 4, 2 pieces::

    COMPUTE   mm(#0 of all)   mm(#1 of all)             wait #0, reduce #0    wait #1, reduce #1
    COPY                      push #0 to 2, 3, 0        push #1 to 2, 3, 0

Share (all_reduce): the owner pushes the reduced shard to every peer; arriving shards are copied into the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction

from ..steps import ONE, ZERO, Buf, Compute, FlagKind, Queue, Reduce, Region
from .schedule_writer import ScheduleWriter, pieces, regions, runs, split

Portion = tuple[Sequence[int], int, tuple[Fraction, Fraction], Sequence[int]]
"""What one matmul makes: shards, number of the piece and its interval; and the owners it is pushed to, in their order."""


def scatter_products(script: ScheduleWriter) -> None:
    """Compute PARTIAL, some shards or one stripe at a time, and push what is there to its owner's LANDING."""
    free: set[int] = set()
    for shards, index, cut, owners in _portions(script):
        made = script.event() if owners else None
        writes = regions(Region(Buf.PARTIAL, script.rank, 0, *cut), shards)
        for term in range(script.key.terms):
            record = made if term == script.key.terms - 1 else None
            add = term > 0
            script.add(Compute(queue=Queue.COMPUTE, index=term, reads=(), writes=writes, accumulate=add, record=record))
        after = () if made is None else (made,)
        for owner in owners:
            if owner not in free:
                script.wait_slot_free(owner)
                free.add(owner)
            src, dst = Region(Buf.PARTIAL, script.rank, owner, *cut), Region(Buf.LANDING, owner, script.rank, *cut)
            script.push(src, dst, FlagKind.READY, index, after)
            after = ()  # the pushes behind it on the queue need not wait again


def _portions(script: ScheduleWriter) -> Iterator[Portion]:
    key, rank = script.key, script.rank
    if key.striped:
        for index, cut in enumerate(pieces(key)):
            yield range(key.ranks), index, cut, script.peers_up
        return
    for batch in split([*script.peers_up, rank], key.chunks if 0 < key.chunks < key.ranks else key.ranks):
        for run in runs(batch):
            # Nothing waits for the own shard alone: it is not cut.
            for index, cut in enumerate(pieces(key) if run != [rank] else [(ZERO, ONE)]):
                yield run, index, cut, [shard for shard in batch if shard in run and shard != rank]


def scatter_input(script: ScheduleWriter) -> None:
    """Push the shards of INPUT to their owners' LANDING (bulk: they are all there when the call begins)."""
    rank = script.rank
    for owner in script.peers_up:
        script.wait_slot_free(owner)
        for index, (lo, hi) in enumerate(pieces(script.key)):
            src, dst = Region(Buf.INPUT, rank, owner, lo, hi), Region(Buf.LANDING, owner, rank, lo, hi)
            script.push(src, dst, FlagKind.READY, index)


def reduce_own(script: ScheduleWriter, own: Buf, shard: int, *, share: bool) -> None:
    """Sum what landed and this rank's own shard (in `own`) into OUTPUT shard `shard`, piece by piece, in rank order.

    share: push every reduced piece on to all peers' LANDING2 at once. Their slots are known to be free: the scatter phase
    waited for that, earlier on the same queue.
    """
    rank = script.rank
    for index, (lo, hi) in enumerate(pieces(script.key)):
        for source in script.peers_down:  # the order in which they arrive: rank r-1 computes shard r first
            script.wait(FlagKind.READY, source, index)
        sources = tuple(
            Region(own if source == rank else Buf.LANDING, rank, source, lo, hi) for source in range(script.key.ranks)
        )
        reduced = Region(Buf.OUTPUT, rank, shard, lo, hi)
        made = script.event() if share and script.peers_down else None
        script.add(Reduce(queue=Queue.COMPUTE, srcs=sources, dst=reduced, record=made))
        after = () if made is None else (made,)
        for peer in script.peers_down if share else ():
            script.push(reduced, Region(Buf.LANDING2, peer, rank, lo, hi), FlagKind.READY2, index, after)
            after = ()  # the pushes behind it on the queue need not wait again


def collect(script: ScheduleWriter, landing: Buf, kind: FlagKind) -> None:
    """Copy the peers' shards from a landing area to OUTPUT as they arrive."""
    for source in script.peers_up:
        for index, (lo, hi) in enumerate(pieces(script.key)):
            script.wait(kind, source, index)
            script.local_copy(Region(landing, script.rank, source, lo, hi), Region(Buf.OUTPUT, script.rank, source, lo, hi))

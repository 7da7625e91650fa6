"""The two phases of reductions, shared by the scatter, all_reduce and bulk builders.

Scatter: every rank computes the shards of its partial product up the ring, own shard last, and pushes each to its owner when
it is done. The owner sums all ranks' shards in rank order, in fp32. Rank 1 of 4::

    COMPUTE   mm(2)   mm(3)      mm(0)      mm(own 1)   wait all, reduce
    COPY              push to 2  push to 3  push to 0

Striped, every matmul makes one piece of all shards (R blocks of rows, one batched matmul), so each is a small reduce_scatter.
The pushes of the last one are exposed, but all earlier pieces are summed meanwhile. Rank 1 of 4, 2 pieces::

    COMPUTE   mm(#0 of all)   mm(#1 of all)             wait #0, reduce #0    wait #1, reduce #1
    COPY                      push #0 to 2, 3, 0        push #1 to 2, 3, 0

Direct, one matmul stores each shard at its owner, and the copy queue is idle. The matmul computes the own shard last: the
peers' shards travel meanwhile, and no two ranks begin with the same owner. Rank 1 of 4::

    COMPUTE   mm(2 at 2, 3 at 3, 0 at 0, own 1)   tell 2, 3, 0   wait all, reduce

Share (all_reduce): the owner pushes the reduced shard to every peer; arriving shards are copied into the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction

from ..steps import ONE, ZERO, Buf, Compute, FlagKind, Queue, Reduce, Region
from .schedule_writer import ScheduleWriter, pieces, regions, runs, split

MatmulOutput = tuple[Sequence[int], int, tuple[Fraction, Fraction], Sequence[int]]
"""The output of one matmul: shards, number of the piece and its interval, and the owners it is pushed to, in push order."""


def scatter_products(writer: ScheduleWriter) -> Buf:
    """Compute the product so that every shard lands at its owner. Return the buffer that holds this rank's own shard."""
    if writer.key.direct:
        _store_at_owners(writer)
        return Buf.LANDING
    _push_partial(writer)
    return Buf.PARTIAL


def _store_at_owners(writer: ScheduleWriter) -> None:
    """Compute every shard into its owner's LANDING by one matmul, and tell the owners."""
    for owner in writer.peers_up:
        writer.wait_slot_free(owner, Queue.COMPUTE)
    writes = tuple(Region(Buf.LANDING, owner, writer.rank) for owner in (*writer.peers_up, writer.rank))
    writer.add(Compute(queue=Queue.COMPUTE, index=0, reads=(), writes=writes))
    for owner in writer.peers_up:
        writer.signal(Queue.COMPUTE, FlagKind.READY, owner)


def _push_partial(writer: ScheduleWriter) -> None:
    """Compute PARTIAL, some shards or one stripe at a time, and push the output to its owner's LANDING."""
    free: set[int] = set()
    for shards, index, cut, owners in _matmul_outputs(writer):
        computed = writer.event() if owners else None
        writes = regions(Region(Buf.PARTIAL, writer.rank, 0, *cut), shards)
        for term in range(writer.key.terms):
            record = computed if term == writer.key.terms - 1 else None
            add = term > 0
            writer.add(Compute(queue=Queue.COMPUTE, index=term, reads=(), writes=writes, accumulate=add, record=record))
        after = () if computed is None else (computed,)
        for owner in owners:
            if owner not in free:
                writer.wait_slot_free(owner)
                free.add(owner)
            src, dst = Region(Buf.PARTIAL, writer.rank, owner, *cut), Region(Buf.LANDING, owner, writer.rank, *cut)
            writer.push(src, dst, FlagKind.READY, index, after)
            after = ()  # later pushes on the queue need not wait again


def _matmul_outputs(writer: ScheduleWriter) -> Iterator[MatmulOutput]:
    key, rank = writer.key, writer.rank
    if key.striped:
        for index, cut in enumerate(pieces(key)):
            yield range(key.ranks), index, cut, writer.peers_up
        return
    for batch in split([*writer.peers_up, rank], key.chunks if 0 < key.chunks < key.ranks else key.ranks):
        for run in runs(batch):
            # The own shard is not cut: no step waits for it alone.
            for index, cut in enumerate(pieces(key) if run != [rank] else [(ZERO, ONE)]):
                yield run, index, cut, [shard for shard in batch if shard in run and shard != rank]


def scatter_input(writer: ScheduleWriter) -> None:
    """Push the shards of INPUT to their owners' LANDING (bulk: all of INPUT is available when the call begins)."""
    rank = writer.rank
    for owner in writer.peers_up:
        writer.wait_slot_free(owner)
        for index, (lo, hi) in enumerate(pieces(writer.key)):
            src, dst = Region(Buf.INPUT, rank, owner, lo, hi), Region(Buf.LANDING, owner, rank, lo, hi)
            writer.push(src, dst, FlagKind.READY, index)


def reduce_own(writer: ScheduleWriter, own: Buf, shard: int, *, share: bool) -> None:
    """Sum the landed shards and this rank's own shard (in `own`) into OUTPUT shard `shard`, piece by piece, in rank order.

    share: push every reduced piece to all peers' LANDING2 at once. Their slots are free: the scatter phase waited for that
    earlier on the same queue.
    """
    rank = writer.rank
    for index, (lo, hi) in enumerate(pieces(writer.key)):
        for source in writer.peers_down:  # the order in which they arrive: rank r-1 computes shard r first
            writer.wait(FlagKind.READY, source, index)
        sources = tuple(
            Region(own if source == rank else Buf.LANDING, rank, source, lo, hi) for source in range(writer.key.ranks)
        )
        reduced = Region(Buf.OUTPUT, rank, shard, lo, hi)
        summed = writer.event() if share and writer.peers_down else None
        writer.add(Reduce(queue=Queue.COMPUTE, srcs=sources, dst=reduced, record=summed))
        after = () if summed is None else (summed,)
        for peer in writer.peers_down if share else ():
            writer.push(reduced, Region(Buf.LANDING2, peer, rank, lo, hi), FlagKind.READY2, index, after)
            after = ()  # later pushes on the queue need not wait again


def collect(writer: ScheduleWriter, landing: Buf, kind: FlagKind) -> None:
    """Copy the peers' shards from a landing area to OUTPUT as they arrive."""
    for source in writer.peers_up:
        for index, (lo, hi) in enumerate(pieces(writer.key)):
            writer.wait(kind, source, index)
            writer.local_copy(Region(landing, writer.rank, source, lo, hi), Region(Buf.OUTPUT, writer.rank, source, lo, hi))

"""all_gather -> matmul: shards are multiplied as they arrive.

Rank 1 of 4, one piece a shard::

    COPY      push to 0        push to 3        push to 2
    COMPUTE   mm(own 1)   wait 2, mm(2)   wait 3, mm(3)   wait 0, mm(0)   done

Every rank pushes down the ring (r-1, r-2, ...) and consumes up the ring (r+1, r+2, ...), so what rank r pushes as its
i-th shard is what its receiver wants as its i-th, and each receiver is written by one sender at a time.
With chunks < R the arriving shards are awaited in chunks - 1 batches (own shard is a piece by itself: it lies in another
buffer and needs no wait); neighbouring shards of a batch are one matmul.
"""

from __future__ import annotations

from ..steps import Buf, Finish, FlagKind, Key, Matmul, Queue, Region, Schedule
from .script import Script, pieces, regions, runs, split


def build(key: Key, rank: int) -> Schedule:
    """The schedule of `rank` for an "all_gather_matmul" key."""
    script = Script(key, rank)
    cuts = pieces(key)
    for peer in script.peers_down:
        script.wait_slot_free(peer)
        for index, (lo, hi) in enumerate(cuts):
            mine, there = Region(Buf.INPUT, rank, rank, lo, hi), Region(Buf.LANDING, peer, rank, lo, hi)
            script.push(mine, there, FlagKind.READY, index)

    _consume(script, (Region(Buf.INPUT, rank, rank),), first=True)
    batches = split(script.peers_up, key.chunks - 1 if 0 < key.chunks < key.ranks else key.ranks)
    for batch in batches:
        for index, (lo, hi) in enumerate(cuts):  # a batch of several shards has one piece a shard
            for shard in batch:
                script.wait(FlagKind.READY, shard, index)
            for run in runs(batch):
                _consume(script, regions(Region(Buf.LANDING, rank, 0, lo, hi), run), first=False)
    for index, contracts in enumerate(key.contracts):
        if contracts:
            script.add(Finish(queue=Queue.COMPUTE, index=index))
    return script.close()


def _consume(script: Script, sources: tuple[Region, ...], first: bool) -> None:
    """Everything that is done with pieces that are here: each consumer's matmul, and the kept copy."""
    for index, contracts in enumerate(script.key.contracts):
        if contracts:
            writes: tuple[Region, ...] = (Region(Buf.RESULT, script.rank, 0, index=index),)
        else:
            writes = tuple(Region(Buf.RESULT, script.rank, s.shard, s.lo, s.hi, index) for s in sources)
        add = contracts and not first
        script.add(Matmul(queue=Queue.COMPUTE, index=index, reads=sources, writes=writes, accumulate=add))
    if script.key.keep:
        for source in sources:
            script.local_copy(source, Region(Buf.OUTPUT, script.rank, source.shard, source.lo, source.hi))

"""all_gather -> matmul: shards are multiplied as they arrive.

Rank 1 of 4, one piece a shard::

    COPY      push to 0        push to 3        push to 2
    COMPUTE   mm(own 1)   wait 2, mm(2)   wait 3, mm(3)   wait 0, mm(0)   done

Every rank pushes down the ring (r-1, r-2, ...) and consumes up the ring (r+1, r+2, ...), so what rank r pushes as its
i-th shard is what its receiver wants as its i-th, and each receiver is written by one sender at a time.
With chunks < R the arriving shards are awaited in chunks - 1 batches (own shard is a piece by itself: it lies in another
buffer and needs no wait); neighbouring shards of a batch are one matmul.

Consumers that contract over the gathered dim (weight gradients) come last, each as one matmul with the whole gathered matrix:
the others have hidden the communication, and adding shard to shard would move an fp32 sum through memory at every step. The
own shard is copied beside the others for that. Where every consumer contracts, they do add up shards as these arrive.
chunks = 1: nothing is pipelined, all consumers are multiplied with the whole matrix once it is here.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..steps import ONE, ZERO, Buf, Compute, Finish, FlagKind, Key, Queue, Region, Schedule
from .schedule_writer import ScheduleWriter, pieces, regions, runs, split


def build(key: Key, rank: int) -> Schedule:
    """The schedule of `rank` for an "all_gather_matmul" key."""
    script = ScheduleWriter(key, rank)
    cuts = pieces(key)
    for peer in script.peers_down:
        script.wait_slot_free(peer)
        for index, (lo, hi) in enumerate(cuts):
            mine, there = Region(Buf.INPUT, rank, rank, lo, hi), Region(Buf.LANDING, peer, rank, lo, hi)
            script.push(mine, there, FlagKind.READY, index)

    early, late = _turns(key)
    pipelined = bool(early) or not late
    if pipelined:
        _consume(script, early, (Region(Buf.INPUT, rank, rank),), first=True)
    if late and key.ranks > 1:
        script.local_copy(Region(Buf.INPUT, rank, rank), Region(Buf.LANDING, rank, rank))
    batches = split(script.peers_up, key.chunks - 1 if 0 < key.chunks < key.ranks else key.ranks)
    for batch in batches:
        for index, (lo, hi) in enumerate(cuts):  # a batch of several shards has one piece a shard
            for shard in batch:
                script.wait(FlagKind.READY, shard, index)
            for run in runs(batch) if pipelined else ():
                _consume(script, early, regions(Region(Buf.LANDING, rank, 0, lo, hi), run), first=False)
    for index in early:
        if key.contracts[index]:
            script.add(Finish(queue=Queue.COMPUTE, index=index))
    _multiply_whole(script, late, keep=key.keep and not pipelined)
    return script.close()


def _turns(key: Key) -> tuple[list[int], list[int]]:
    """The consumers that take shards as they arrive, and those that wait for all."""
    every = list(range(len(key.contracts)))
    if key.chunks == 1 or key.ranks == 1:
        return [], every
    if all(key.contracts):
        return every, []
    return [index for index in every if not key.contracts[index]], [index for index in every if key.contracts[index]]


def _consume(script: ScheduleWriter, consumers: Sequence[int], sources: tuple[Region, ...], first: bool) -> None:
    """Everything that is done with pieces that are here: each consumer's matmul, and the kept copy."""
    for index in consumers:
        contracts = script.key.contracts[index]
        if contracts:
            writes: tuple[Region, ...] = (Region(Buf.RESULT, script.rank, 0, index=index),)
        else:
            writes = tuple(Region(Buf.RESULT, script.rank, s.shard, s.lo, s.hi, index) for s in sources)
        add = contracts and not first
        script.add(Compute(queue=Queue.COMPUTE, index=index, reads=sources, writes=writes, accumulate=add))
    if script.key.keep:
        for source in sources:
            script.local_copy(source, Region(Buf.OUTPUT, script.rank, source.shard, source.lo, source.hi))


def _multiply_whole(script: ScheduleWriter, consumers: Sequence[int], keep: bool) -> None:
    """The matmuls with the gathered matrix as it lies in the landing area (in a group of one: in the input), and its copy."""
    rank, ranks = script.rank, script.key.ranks
    sources = regions(Region(Buf.LANDING if ranks > 1 else Buf.INPUT, rank, 0, ZERO, ONE), range(ranks))
    for index in consumers:
        if script.key.contracts[index]:
            writes: tuple[Region, ...] = (Region(Buf.RESULT, rank, 0, index=index),)
        else:
            writes = regions(Region(Buf.RESULT, rank, 0, index=index), range(ranks))
        script.add(Compute(queue=Queue.COMPUTE, index=index, reads=sources, writes=writes))
    for source in sources if keep else ():
        script.local_copy(source, Region(Buf.OUTPUT, rank, source.shard))

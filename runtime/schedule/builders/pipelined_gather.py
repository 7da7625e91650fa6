"""all_gather -> matmul: shards are multiplied as they arrive.

Rank 1 of 4, one piece per shard::

    COPY      push to 0        push to 3        push to 2
    COMPUTE   mm(own 1)   wait 2, mm(2)   wait 3, mm(3)   wait 0, mm(0)   done

Every rank pushes down the ring (r-1, r-2, ...) and consumes up the ring (r+1, r+2, ...). So the i-th push of a rank is the
i-th shard that its receiver consumes, and each receiver has one sender at a time.
With chunks < R the arriving shards are awaited in chunks - 1 batches. The own shard is a separate piece: it is in another
buffer and needs no wait. Adjacent shards of a batch are one matmul.

Consumers that contract over the gathered dim (weight gradients) run last, each as one matmul with the full gathered matrix. By
then the other consumers have hidden the communication, and adding shard by shard would move an fp32 sum through memory at
every step. For that matmul the own shard is copied next to the landed ones. Where every consumer contracts, they add up shards
as these arrive. chunks = 1: nothing is pipelined, all consumers run on the full matrix once it has arrived.

Independent matmuls run behind the own piece and before the first wait. With enough of them chunks = 1 or 2 exposes nothing,
and the consumers need not be cut into R pieces::

    COPY      push to 0        push to 3        push to 2
    COMPUTE   mm(own 1)   independent ..............   wait 2, 3, 0   mm(2, 3), mm(0)   done
"""

from __future__ import annotations

from collections.abc import Sequence

from ..steps import ONE, ZERO, Buf, Compute, Finish, FlagKind, Key, Queue, Region, Schedule
from .schedule_writer import ScheduleWriter, pieces, regions, runs, split


def build(key: Key, rank: int) -> Schedule:
    """Build the schedule of `rank` for an "all_gather_matmul" key."""
    writer = ScheduleWriter(key, rank)
    cuts = pieces(key)
    writer.push_shard()

    streaming, waiting = _split_consumers(key)
    is_pipelined = bool(streaming) or not waiting
    if is_pipelined:
        _consume(writer, streaming, (Region(Buf.INPUT, rank, rank),), first=True)
    if waiting and key.ranks > 1:
        writer.local_copy(Region(Buf.INPUT, rank, rank), Region(Buf.LANDING, rank, rank))
    writer.independent_matmuls()
    batches = split(writer.peers_up, key.chunks - 1 if 0 < key.chunks < key.ranks else key.ranks)
    for batch in batches:
        for index, (lo, hi) in enumerate(cuts):  # a batch of several shards has one piece a shard
            for shard in batch:
                writer.wait(FlagKind.READY, shard, index)
            for run in runs(batch) if is_pipelined else ():
                _consume(writer, streaming, regions(Region(Buf.LANDING, rank, 0, lo, hi), run), first=False)
    for index in streaming:
        if key.contracts[index]:
            writer.add(Finish(queue=Queue.COMPUTE, index=index))
    _consume_full(writer, waiting, keep=key.keep and not is_pipelined)
    return writer.close()


def _split_consumers(key: Key) -> tuple[list[int], list[int]]:
    """Return the consumers that use shards as they arrive, and those that wait for all shards."""
    consumers = list(range(len(key.contracts)))
    if key.chunks == 1 or key.ranks == 1:
        return [], consumers
    if all(key.contracts):
        return consumers, []
    return [i for i in consumers if not key.contracts[i]], [i for i in consumers if key.contracts[i]]


def _consume(writer: ScheduleWriter, consumers: Sequence[int], sources: tuple[Region, ...], first: bool) -> None:
    """Add all steps on arrived pieces: each consumer's matmul, and the copy to the kept output."""
    for index in consumers:
        contracts = writer.key.contracts[index]
        if contracts:
            writes: tuple[Region, ...] = (Region(Buf.RESULT, writer.rank, 0, index=index),)
        else:
            writes = tuple(Region(Buf.RESULT, writer.rank, s.shard, s.lo, s.hi, index) for s in sources)
        add = contracts and not first
        writer.add(Compute(queue=Queue.COMPUTE, index=index, reads=sources, writes=writes, accumulate=add))
    if writer.key.keep:
        for source in sources:
            writer.local_copy(source, Region(Buf.OUTPUT, writer.rank, source.shard, source.lo, source.hi))


def _consume_full(writer: ScheduleWriter, consumers: Sequence[int], keep: bool) -> None:
    """Add the matmuls with the gathered matrix in the landing area (in a group of one: in the input), and its copy."""
    rank, ranks = writer.rank, writer.key.ranks
    sources = regions(Region(Buf.LANDING if ranks > 1 else Buf.INPUT, rank, 0, ZERO, ONE), range(ranks))
    for index in consumers:
        if writer.key.contracts[index]:
            writes: tuple[Region, ...] = (Region(Buf.RESULT, rank, 0, index=index),)
        else:
            writes = regions(Region(Buf.RESULT, rank, 0, index=index), range(ranks))
        writer.add(Compute(queue=Queue.COMPUTE, index=index, reads=sources, writes=writes))
    for source in sources if keep else ():
        writer.local_copy(source, Region(Buf.OUTPUT, rank, source.shard))

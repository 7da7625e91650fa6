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

The kept tensor is copied out of the landing area, and the own shard into it, on COMPUTE. With engine_copies both are copied on
COPY, behind the pushes, while matmuls run. COPY learns from an event that a shard has landed::

    COPY      push to 0   push to 3   push to 2   keep own 1   (2 landed) keep 2   (3 landed) keep 3   (0 landed) keep 0
    COMPUTE   mm(own 1)   wait 2, mm(2)   wait 3, mm(3)   wait 0, mm(0)   done
"""

from __future__ import annotations

from collections.abc import Sequence

from ..steps import ONE, ZERO, Buf, Compute, Finish, FlagKind, Key, Queue, Region, Schedule
from .schedule_writer import ScheduleWriter, pieces, regions, runs, split


def build(key: Key, rank: int) -> Schedule:
    """Build the schedule of `rank` for an "all_gather_matmul" key."""
    return _GatherWriter(key, rank).build()


class _GatherWriter(ScheduleWriter):
    """A gather being written. `_copies`: the queue of its local copies; a group of one has no COPY steps to join."""

    def __init__(self, key: Key, rank: int) -> None:
        super().__init__(key, rank)
        self._copies = Queue.COPY if key.engine_copies and key.ranks > 1 else Queue.COMPUTE

    def build(self) -> Schedule:
        """Write all steps."""
        key, rank, cuts = self.key, self.rank, pieces(self.key)
        self.push_shard()
        streaming, waiting = _split_consumers(key)
        is_pipelined = bool(streaming) or not waiting
        keeps_pieces, own = key.keep and is_pipelined, Region(Buf.INPUT, rank, rank)
        if is_pipelined:
            self._consume(streaming, (own,), first=True)
        if keeps_pieces:
            self._keep((own,))
        placed: tuple[int, ...] = ()
        if waiting and key.ranks > 1:
            placed = self._place_own(own)
        self.independent_matmuls()
        batches = split(self.peers_up, key.chunks - 1 if 0 < key.chunks < key.ranks else key.ranks)
        landed: tuple[int, ...] = ()
        for batch in batches:
            for index, (lo, hi) in enumerate(cuts):  # a batch of several shards has one piece a shard
                landed = self._wait(batch, index, is_read_by_copies=key.keep)
                for run in runs(batch) if is_pipelined else ():
                    sources = regions(Region(Buf.LANDING, rank, 0, lo, hi), run)
                    self._consume(streaming, sources, first=False)
                    if keeps_pieces:
                        self._keep(sources, landed)
                        landed = ()  # later copies on the queue need not wait again
        for index in streaming:
            if key.contracts[index]:
                self.add(Finish(queue=Queue.COMPUTE, index=index))
        self._consume_full(waiting, placed, landed if key.keep and not is_pipelined else None)
        return self.close()

    def _place_own(self, own: Region) -> tuple[int, ...]:
        """Copy the own shard next to the landed ones. Return the event after which COMPUTE may read it there."""
        to = Region(Buf.LANDING, self.rank, self.rank)
        if self._copies is Queue.COMPUTE:
            self.local_copy(own, to)
            return ()
        placed = self.event()
        self.local_copy(own, to, Queue.COPY, record=placed)
        return (placed,)

    def _wait(self, batch: Sequence[int], index: int, is_read_by_copies: bool) -> tuple[int, ...]:
        """Wait for a piece of the shards of `batch`. Return the event after which COPY may read it."""
        landed = self.event() if is_read_by_copies and self._copies is Queue.COPY else None
        for shard in batch:
            self.wait(FlagKind.READY, shard, index, landed if shard == batch[-1] else None)
        return () if landed is None else (landed,)

    def _consume(self, consumers: Sequence[int], sources: tuple[Region, ...], first: bool) -> None:
        """Add each consumer's matmul with arrived pieces."""
        for index in consumers:
            contracts = self.key.contracts[index]
            if contracts:
                writes: tuple[Region, ...] = (Region(Buf.RESULT, self.rank, 0, index=index),)
            else:
                writes = tuple(Region(Buf.RESULT, self.rank, s.shard, s.lo, s.hi, index) for s in sources)
            add = contracts and not first
            self.add(Compute(queue=Queue.COMPUTE, index=index, reads=sources, writes=writes, accumulate=add))

    def _keep(self, sources: tuple[Region, ...], landed: tuple[int, ...] = ()) -> None:
        """Copy arrived pieces to the kept output."""
        for source in sources:
            kept = Region(Buf.OUTPUT, self.rank, source.shard, source.lo, source.hi)
            self.local_copy(source, kept, self._copies, after=landed)
            landed = ()

    def _consume_full(self, consumers: Sequence[int], placed: tuple[int, ...], landed: tuple[int, ...] | None) -> None:
        """Add the matmuls with the gathered matrix in the landing area (in a group of one: in the input), and its copy.

        `landed`: the event after which COPY may read all of it; None where nothing is kept."""
        rank, ranks = self.rank, self.key.ranks
        sources = regions(Region(Buf.LANDING if ranks > 1 else Buf.INPUT, rank, 0, ZERO, ONE), range(ranks))
        if landed is not None and self._copies is Queue.COPY:  # issued first: it runs while the matmuls do
            self._keep(sources, landed)
        for index in consumers:
            if self.key.contracts[index]:
                writes: tuple[Region, ...] = (Region(Buf.RESULT, rank, 0, index=index),)
            else:
                writes = regions(Region(Buf.RESULT, rank, 0, index=index), range(ranks))
            self.add(Compute(queue=Queue.COMPUTE, index=index, reads=sources, writes=writes, after=placed))
            placed = ()
        if landed is not None and self._copies is Queue.COMPUTE:
            self._keep(sources)


def _split_consumers(key: Key) -> tuple[list[int], list[int]]:
    """Return the consumers that use shards as they arrive, and those that wait for all shards."""
    consumers = list(range(len(key.contracts)))
    if key.chunks == 1 or key.ranks == 1:
        return [], consumers
    if all(key.contracts):
        return consumers, []
    return [i for i in consumers if not key.contracts[i]], [i for i in consumers if key.contracts[i]]

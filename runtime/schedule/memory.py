"""Check for races and coverage: conflicting accesses are ordered, reads follow their writes, no cell is stored twice.

Within a call, memory is divided into *cells*: a shard cut at every boundary that any region of the call uses. Nodes are
visited in an order they can run in. A cell records the nodes that read and wrote it, as bit masks. Each further access must
happen after all recorded accesses that conflict with it. An unordered pair is found at its later access.

Between calls an arena slot is a single cell: its layout depends on op and shape. So any access of one call conflicts with any
write of another. Flag words are memory too.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from .effects import Access, accesses, show_flag, show_region
from .happens_before import HappensBefore, Node, Word
from .schedule_error import ScheduleError
from .steps import ONE, ZERO, Buf, Compute, Copy, Opaque, Region, Schedule

Cell = tuple[Buf, int, int, int, int]
"""Buffer, rank, consumer, shard, and the cell's number in the shard."""


class Grid:
    """The cells of a call."""

    def __init__(self, schedules: Iterable[Schedule]) -> None:
        points = {ZERO, ONE}
        for schedule in schedules:
            for step in schedule.steps:
                for access in accesses(step, schedule.rank):
                    points.add(access.region.lo)
                    points.add(access.region.hi)
        # Keys are numerator and denominator: hashing a Fraction costs a modular inverse.
        self._place = {(p.numerator, p.denominator): i for i, p in enumerate(sorted(points))}
        self.count = len(points) - 1

    def numbers(self, region: Region) -> range:
        """Return the cells of `region`, as numbers within its shard."""
        lo, hi = region.lo, region.hi
        return range(self._place[lo.numerator, lo.denominator], self._place[hi.numerator, hi.denominator])

    def cells(self, region: Region) -> list[Cell]:
        """Return the cells of `region`."""
        return [(region.buf, region.rank, region.index, region.shard, number) for number in self.numbers(region)]


def check_call(order: HappensBefore, grid: Grid) -> None:
    """Check the memory rules within the one call of `order`."""
    ranks = order.calls[0].schedules[0].key.ranks
    read: dict[Cell, int] = {}
    written: dict[Cell, int] = {}
    for node in order.sequence:
        bit = 1 << node.id
        unordered = ~(order.ended[node.id] | bit)
        for access in _accesses_of(node):
            _check_region(order, node, access, ranks)
            for cell in grid.cells(access.region):
                writers = written.get(cell, 0)
                conflicting = writers | read.get(cell, 0) if access.write else writers
                if conflicting & unordered:
                    other = order.first(conflicting & unordered)
                    raise ScheduleError(
                        "race", f"nothing orders {order.where(other)} and {order.where(node)} on {show_region(access.region)}"
                    )
                if not writers and (access.adds or not access.write) and access.region.buf not in (Buf.INPUT, Buf.OPERAND):
                    verb = "adds to" if access.write else "reads"
                    raise ScheduleError(
                        "unwritten", f"{order.where(node)} {verb} {show_region(access.region)} before it is written"
                    )
                if writers and access.write and not access.adds:
                    other = order.first(writers)
                    raise ScheduleError(
                        "written twice",
                        f"{order.where(node)} stores {show_region(access.region)} again after {order.where(other)}",
                    )
                if access.write:
                    written[cell] = writers | bit
                else:
                    read[cell] = read.get(cell, 0) | bit


def check_slots(order: HappensBefore) -> None:
    """Check that a call accesses a slot only after the slot's previous call is done with it, for any two calls.

    Only arena slots outlive a call. User tensors return to the caller when it ends (the join rule of checker.py).
    """
    uses_of_calls: list[list[tuple[Node, tuple[object, ...], bool]]] = [[] for _ in order.calls]
    for node in order.nodes:
        call = order.calls[node.call]
        for access in _accesses_of(node):
            if access.region.buf.in_arena:
                slot = (call.group, call.slot(order.slots), access.region.rank)
                uses_of_calls[node.call].append((node, slot, access.write))
    read: dict[tuple[object, ...], int] = {}
    written: dict[tuple[object, ...], int] = {}
    for uses in uses_of_calls:
        for node, slot, write in uses:
            conflicting = written.get(slot, 0) | (read.get(slot, 0) if write else 0)
            if conflicting & ~order.ended[node.id]:
                other = order.first(conflicting & ~order.ended[node.id])
                raise ScheduleError(
                    "slot reuse", f"nothing orders {order.where(other)} and {order.where(node)}, which use one slot"
                )
        for node, slot, write in uses:
            kind = written if write else read
            kind[slot] = kind.get(slot, 0) | 1 << node.id


def check_words(order: HappensBefore) -> None:
    """Check that no flag word is written again before every wait for its last value has ended."""
    epochs: dict[Word, list[int]] = {}
    for word, epoch in order.signalled:
        epochs.setdefault(word, []).append(epoch)
    for word, written in epochs.items():
        written.sort()
        for before, after in pairwise(written):
            writer = order.signalled[word, after]
            for reader in (order.signalled[word, before], *order.awaited.get((word, before), [])):
                if not order.ended[writer.id] >> reader.id & 1:
                    raise ScheduleError(
                        "flag overwritten",
                        f"{order.where(writer)} may write {show_flag(word[2])} before {order.where(reader)} is done with it",
                    )


def _accesses_of(node: Node) -> Iterable[Access]:
    all_accesses = accesses(node.step, node.rank)
    if node.opens and node.closes:
        return all_accesses
    return (access for access in all_accesses if access.write == node.opens)


def _check_region(order: HappensBefore, node: Node, access: Access, ranks: int) -> None:
    region = access.region
    if not (0 <= region.rank < ranks and 0 <= region.shard < ranks and ZERO <= region.lo < region.hi <= ONE):
        raise ScheduleError("region", f"{order.where(node)}: {show_region(region)} does not exist in a group of {ranks} ranks")
    lands_all = order.calls[node.call].schedules[0].key.lands_all_shards and region.buf is Buf.LANDING
    is_round = order.calls[node.call].schedules[0].key.is_all_to_all and region.buf is Buf.LANDING
    if region.index and region.buf is not Buf.RESULT and not is_round and not (lands_all and region.index < ranks):
        raise ScheduleError("region", f"{order.where(node)}: only RESULT has an index, not {region.buf.name} ({region.index})")
    is_push = (isinstance(node.step, (Copy, Compute)) and access.write) or isinstance(node.step, Opaque)
    if region.rank != node.rank and not (region.buf.in_arena and is_push):
        raise ScheduleError(
            "region", f"{order.where(node)}: only pushes to a peer's arena access other ranks, not {show_region(region)}"
        )
    if access.write and region.buf in (Buf.INPUT, Buf.OPERAND):
        raise ScheduleError("region", f"{order.where(node)} writes {show_region(region)}, which belongs to the caller")

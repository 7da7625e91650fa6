"""Races and coverage: every conflicting pair of accesses is ordered, every read finds what it reads, nothing is stored twice.

Inside a call memory is looked at in *cells*: a shard cut at every boundary that any region of the call uses. Nodes are
visited in an order they can run in; a cell remembers the nodes that read and wrote it, as bit masks, and each further access
must come after all of those that it conflicts with. What is not ordered either way is found at the later of the two.

Between calls an arena slot is one single cell: its layout differs from op to op and from shape to shape, so any access of
one call conflicts with any write of another.
"""

from __future__ import annotations

from collections.abc import Iterable

from .effects import Access, accesses, show_region
from .happens_before import HappensBefore, Node
from .schedule_error import ScheduleError
from .steps import ONE, ZERO, Buf, Copy, Opaque, Region, Schedule

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
        # Looked up by numerator and denominator: hashing a Fraction costs a modular inverse.
        self._place = {(p.numerator, p.denominator): i for i, p in enumerate(sorted(points))}
        self.count = len(points) - 1

    def numbers(self, region: Region) -> range:
        """The cells of `region`, as numbers within its shard."""
        lo, hi = region.lo, region.hi
        return range(self._place[lo.numerator, lo.denominator], self._place[hi.numerator, hi.denominator])

    def cells(self, region: Region) -> list[Cell]:
        return [(region.buf, region.rank, region.index, region.shard, number) for number in self.numbers(region)]


def check_call(order: HappensBefore, grid: Grid) -> None:
    """The rules of memory within the one call of `order`."""
    ranks = order.calls[0].schedules[0].key.ranks
    read: dict[Cell, int] = {}
    written: dict[Cell, int] = {}
    for node in order.sequence:
        bit = 1 << node.id
        unordered = ~(order.ended[node.id] | bit)
        for access in _of(node):
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
                    does = "adds to" if access.write else "reads"
                    raise ScheduleError(
                        "unwritten", f"{order.where(node)} {does} {show_region(access.region)} before it is written"
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
    """A slot's next user touches it only after its last user is done with it, whatever the two calls are.

    Only arena slots outlive a call; user tensors are the caller's again when it ends (the join rule of checker.py).
    """
    mine: list[list[tuple[Node, tuple[object, ...], bool]]] = [[] for _ in order.calls]
    for node in order.nodes:
        call = order.calls[node.call]
        for access in _of(node):
            if access.region.buf.in_arena:
                slot = (call.group, call.epoch % order.slots, access.region.rank)
                mine[node.call].append((node, slot, access.write))
    read: dict[tuple[object, ...], int] = {}
    written: dict[tuple[object, ...], int] = {}
    for uses in mine:
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


def _of(node: Node) -> Iterable[Access]:
    found = accesses(node.step, node.rank)
    if node.opens and node.closes:
        return found
    return (access for access in found if access.write == node.opens)


def _check_region(order: HappensBefore, node: Node, access: Access, ranks: int) -> None:
    region = access.region
    if not (0 <= region.rank < ranks and 0 <= region.shard < ranks and ZERO <= region.lo < region.hi <= ONE):
        raise ScheduleError("region", f"{order.where(node)}: {show_region(region)} does not exist in a group of {ranks} ranks")
    if region.index and region.buf is not Buf.RESULT:
        raise ScheduleError("region", f"{order.where(node)}: only RESULT has an index, not {region.buf.name} ({region.index})")
    pushes = (isinstance(node.step, Copy) and access.write) or isinstance(node.step, Opaque)
    if region.rank != node.rank and not (region.buf.in_arena and pushes):
        raise ScheduleError(
            "region", f"{order.where(node)}: peers are reached by pushes to their arena only, not {show_region(region)}"
        )
    if access.write and region.buf in (Buf.INPUT, Buf.OPERAND):
        raise ScheduleError("region", f"{order.where(node)} writes {show_region(region)}, which belongs to the caller")

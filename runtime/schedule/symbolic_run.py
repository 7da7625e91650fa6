"""Check by symbolic execution that the steps compute the result that the op's definition requires.

`memory.py` has proven that every read sees one definite write. So the result does not depend on the interleaving, and one run
in any valid order is enough. A cell of INPUT holds its own symbol, copies move symbols, matmuls and reductions build terms over
them. At the end every cell of every result must hold exactly the term of the op's definition. That also proves that every
source was used once and in the right order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from .effects import show_region
from .happens_before import HappensBefore, Node
from .memory import Cell, Grid
from .op_contract import product_shard
from .schedule_error import ScheduleError
from .steps import ONE, ZERO, Buf, Compute, Copy, Finish, Key, Reduce, Region

Value = tuple[Any, ...]


class _Sum:
    """An fp32 accumulator of a contraction: the parts added so far."""

    def __init__(self) -> None:
        self.parts: set[Value] = set()
        self.rounded = False  # by a Finish, or because one matmul made the full sum


class SymbolicRun:
    """A symbolic execution of one call."""

    def __init__(self, order: HappensBefore, grid: Grid) -> None:
        self.order = order
        self.grid = grid
        self.keys = tuple(schedule.key for schedule in order.calls[0].schedules)
        self.key: Key = self.keys[0]  # all are alike, apart from `direct`
        self.held: dict[Cell, Value] = {}
        self.sums: dict[tuple[int, int], _Sum] = {}  # by rank and consumer

    def run(self) -> None:
        """Execute all steps, then check all results. Raise ScheduleError on a difference."""
        for node in self.order.sequence:
            match node.step:
                case Copy(src=src, dst=dst):
                    self._copy(node, src, dst)
                case Compute():
                    self._matmul(node, node.step)
                case Reduce():
                    self._reduce(node, node.step)
                case Finish():
                    self._finish(node, node.step.index)
        for cell, expected in expected_cells(self.keys, self.grid.count):
            if self.held.get(cell) != expected:
                raise ScheduleError("result", f"{_show_cell(cell)} ends as {self.held.get(cell)}, expected {expected}")
        for index, contracts in enumerate(self.key.contracts):
            for rank in range(self.key.ranks) if contracts else ():
                self._check_sum(rank, index)

    def _fail(self, node: Node, what: str) -> ScheduleError:
        return ScheduleError("meaning", f"{self.order.where(node)} {what}")

    def _load(self, region: Region) -> list[Value]:
        if region.buf is Buf.INPUT:
            return [("input", region.rank, region.shard, cell) for cell in self.grid.numbers(region)]
        return [self.held[cell] for cell in self.grid.cells(region)]

    def _store(self, node: Node, region: Region, values: list[Value]) -> None:
        cells = self.grid.cells(region)
        if len(cells) != len(values):
            raise self._fail(node, f"puts {len(values)} cells into {len(cells)}")
        self.held.update(zip(cells, values, strict=True))

    def _copy(self, node: Node, src: Region, dst: Region) -> None:
        if (src.lo, src.hi) != (dst.lo, dst.hi):
            raise self._fail(node, "copies between different intervals, whose row counts may differ")
        self._store(node, dst, self._load(src))

    def _matmul(self, node: Node, step: Compute) -> None:
        if self.key.is_independent(step):
            self._independent(node, step)
            return
        gathers = self.key.kind == "all_gather_matmul"
        count = len(self.key.contracts) if gathers else self.key.terms
        if not 0 <= step.index < count:
            raise self._fail(node, f"is matmul {step.index}, but the key has {count}")
        if not gathers and step.reads:
            raise self._fail(node, "gathers operands, but this kind's matmuls read only OPERANDs")
        has_products = self.key.kind.startswith("matmul_")
        target_buf = Buf.RESULT if gathers else Buf.LANDING if self.keys[node.rank].direct else Buf.PARTIAL
        for region in step.writes:
            if region.buf is not target_buf or region.index != (step.index if target_buf is Buf.RESULT else 0):
                raise self._fail(node, f"writes {show_region(region)}, expected {target_buf.name} of matmul {step.index}")
        if has_products:
            self._partial(node, step)
        elif self.key.contracts[step.index]:
            self._contract(node, step)
        else:
            if step.accumulate:
                raise self._fail(node, "accumulates, but its consumer does not contract")
            if [(r.shard, r.lo, r.hi) for r in step.reads] != [(w.shard, w.lo, w.hi) for w in step.writes]:
                raise self._fail(node, "reads and writes different pieces")
            for source, target in zip(step.reads, step.writes, strict=True):
                self._store(node, target, [("matmul", step.index, value) for value in self._load(source)])

    def _independent(self, node: Node, step: Compute) -> None:
        if step.reads or step.accumulate or step.writes != (Region(Buf.RESULT, node.rank, 0, index=step.index),):
            raise self._fail(node, "is an independent matmul, so it must store all of its own RESULT and read only OPERANDs")
        for region in step.writes:
            self._store(node, region, [("matmul", step.index, cell) for cell in self.grid.numbers(region)])

    def _partial(self, node: Node, step: Compute) -> None:
        for region in step.writes:
            for cell in self.grid.cells(region):
                terms = self.held[cell][-1] if step.accumulate else ()
                self.held[cell] = (
                    "partial", node.rank, product_shard(region), cell[4], tuple(sorted((*terms, step.index))),
                )  # fmt: skip

    def _contract(self, node: Node, step: Compute) -> None:
        if step.writes != (Region(Buf.RESULT, node.rank, 0, index=step.index),):
            raise self._fail(node, "contracts, so it must write all of RESULT shard 0")
        at = (node.rank, step.index)
        if not step.accumulate:
            self.sums[at] = _Sum()
        total = self.sums[at]
        if total.rounded:
            raise self._fail(node, "adds to a sum that is already rounded")
        total.rounded = self._is_full_product(step)
        for region in step.reads:
            for value in self._load(region):
                if value in total.parts:
                    raise self._fail(node, f"adds {value} a second time")
                total.parts.add(value)

    def _is_full_product(self, step: Compute) -> bool:
        """Return whether this is one matmul with the full gathered matrix in one buffer."""
        buffers = {region.buf for region in step.reads}
        pieces = [(region.shard, region.lo, region.hi) for region in step.reads]
        is_complete = pieces == [(shard, ZERO, ONE) for shard in range(self.key.ranks)]
        return not step.accumulate and is_complete and len(buffers) == 1

    def _reduce(self, node: Node, step: Reduce) -> None:
        if any((src.lo, src.hi) != (step.dst.lo, step.dst.hi) for src in step.srcs):
            raise self._fail(node, "sums different intervals")
        columns = zip(*(self._load(src) for src in step.srcs), strict=True)
        self._store(node, step.dst, [("sum", *column) for column in columns])

    def _finish(self, node: Node, index: int) -> None:
        total = self.sums.get((node.rank, index))
        if total is None or total.rounded:
            raise self._fail(node, "rounds a sum that is absent or already rounded")
        total.rounded = True

    def _check_sum(self, rank: int, index: int) -> None:
        shards, cells = range(self.key.ranks), range(self.grid.count)
        expected = {("input", shard, shard, cell) for shard in shards for cell in cells}
        total = self.sums.get((rank, index), _Sum())
        if total.parts != expected:
            raise ScheduleError("result", f"rank {rank}: consumer {index} sums {len(total.parts)} of {len(expected)} parts")
        if not total.rounded:
            raise ScheduleError("result", f"rank {rank}: the sum of consumer {index} is never rounded (Finish)")


def expected_cells(keys: Sequence[Key], cells: int) -> Iterator[tuple[Cell, Value]]:
    """Yield the final value of every cell of every result, except sums of contractions. `keys`: each rank's."""
    key = keys[0]
    ranks = range(key.ranks)
    terms = tuple(range(key.terms))
    has_products = key.kind.startswith("matmul_")

    def total(shard: int, cell: int) -> Value:
        parts = (("partial", q, shard, cell, terms) if has_products else ("input", q, shard, cell) for q in ranks)
        return ("sum", *parts)

    for rank in ranks:
        for cell in range(cells):
            for shard in ranks:
                if has_products and not keys[rank].direct:
                    yield (Buf.PARTIAL, rank, 0, shard, cell), ("partial", rank, shard, cell, terms)
                if key.is_all_to_all:
                    yield (Buf.OUTPUT, rank, 0, shard, cell), ("input", shard, rank, cell)
                if key.returns_gathered:
                    yield (key.collected_in, rank, 0, shard, cell), ("input", shard, shard, cell)
                if key.kind.endswith("all_reduce"):
                    yield (Buf.OUTPUT, rank, 0, shard, cell), total(shard, cell)
                for index, contracts in enumerate(key.contracts):
                    if not contracts:
                        yield (Buf.RESULT, rank, index, shard, cell), ("matmul", index, ("input", shard, shard, cell))
            if key.kind.endswith("reduce_scatter"):
                yield (Buf.OUTPUT, rank, 0, 0, cell), total(rank, cell)
            for index in key.independent_indices:
                yield (Buf.RESULT, rank, index, 0, cell), ("matmul", index, cell)


def _show_cell(cell: Cell) -> str:
    buf, rank, index, shard, number = cell
    return f"cell {number} of {show_region(Region(buf, rank, shard, index=index))}"

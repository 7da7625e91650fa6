"""The tensors of one row and its variants. Each call enqueues the op once and returns its result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ub_overlap.runtime.schedule.builders import build
from ub_overlap.runtime.schedule.steps import Compute, Key
from ub_overlap.tools.rank_process import World

from .collectives import RowCollectives
from .suite import SuiteRow

Call = Callable[[], Any]


class Case:
    """AG: `shard` [M/R, K], `full` [M, K] (for the matmul alone), `weight` [K, N/R] -> [M, N/R].
    RS: `full` [M, K/R], `weight` [K/R, N] -> [M/R, N]. The weight is transposed, as a Linear's is; values are random normal.
    """

    def __init__(self, row: SuiteRow, world: World, dtype: torch.dtype, collectives: RowCollectives) -> None:
        self.row, self.world, self.dtype = row, world, dtype
        self.collectives, self.ranks = collectives, collectives.ranks
        m, n, k = row.sizes(self.ranks)
        shard_rows = m // self.ranks

        def randn(*sizes: int) -> torch.Tensor:
            return torch.randn(*sizes, device=world.device, dtype=dtype)

        def empty(*sizes: int) -> torch.Tensor:
            return torch.empty(*sizes, device=world.device, dtype=dtype)

        self.weight = (randn(n, k) * 0.02).t()
        self.full, self.product = randn(m, k), empty(m, n)
        self.gather = row.kind == "AG"
        self.shard = randn(shard_rows, k) if self.gather else empty(0)
        self.gathered = empty(m, k) if self.gather else empty(0)
        self.reduced = empty(0) if self.gather else empty(shard_rows, n)

    def refresh(self) -> None:
        """Write new values into the same tensors, which captured graphs read."""
        for tensor in (self.full, self.shard):
            tensor.normal_()

    def gemm(self) -> torch.Tensor:
        return torch.mm(self.full, self.weight, out=self.product)

    def collective(self) -> torch.Tensor:
        if self.gather:
            self.collectives.gather(self.gathered, self.shard)
            return self.gathered
        self.collectives.scatter(self.reduced, self.product)
        return self.reduced

    def seq(self) -> torch.Tensor:
        """Run the collective and the matmul one after the other."""
        if self.gather:
            self.collectives.gather(self.gathered, self.shard)
            return torch.mm(self.gathered, self.weight, out=self.product)
        torch.mm(self.full, self.weight, out=self.product)
        self.collectives.scatter(self.reduced, self.product)
        return self.reduced

    def torch_fused(self) -> torch.Tensor:
        """Run torch's overlapped op over symmetric memory, as async-TP uses it."""
        if self.gather:
            return torch.ops.symm_mem.fused_all_gather_matmul(self.shard, [self.weight], 0, self.world.group)[1][0]
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(self.full, self.weight, "sum", 0, self.world.group)

    def ours(self, strategy: str, group: str, keep: bool = False) -> Call:
        site = self.site(strategy, keep)
        if self.gather:
            shard, weight = self.shard.unsqueeze(0), self.weight
            op: Any = torch.ops.ub_overlap.all_gather_matmul.default
            return lambda: op(shard, [weight], [False], [False], 1, False, keep, [], [], strategy, group, site)[1][0]
        op = torch.ops.ub_overlap.matmul_reduce_scatter.default
        lhs, rhs, dtype = [self.full], [self.weight], self.dtype
        return lambda: op(lhs, rhs, None, 1, False, "sum", dtype, keep, "plain", [], [], strategy, group, site)[0]

    def variants(self, strategies: Sequence[str], group: str) -> dict[str, Callable[[], Call]]:
        """Return further columns, built on demand. Columns named "ours..." compute the result of `seq`."""
        return {}

    def site(self, strategy: str, keep: bool = False) -> str:
        return f"bench {self.row.title} {strategy}{' keep' if keep else ''}"

    def pieces(self, strategy: str) -> list[int]:
        """Return the rows of each matmul of this rank's schedule, in order. Empty if rows are fractional."""
        chunks = int(strategy.partition(":chunks=")[2] or 0)
        contracts, terms = ((False,), 0) if self.gather else ((), 1)
        kind = "all_gather_matmul" if self.gather else "matmul_reduce_scatter"
        steps = build(Key(kind, self.ranks, chunks, contracts, terms), 0).steps  # of equal sizes on all ranks
        shares = [sum(w.hi - w.lo for w in step.writes) for step in steps if isinstance(step, Compute)]
        rows = [share * (self.row.M // self.ranks) for share in shares]
        return [int(r) for r in rows] if all(r == int(r) for r in rows) else []

    def cut(self, rows: list[int]) -> Call:
        """Return a call of the matmul alone, in pieces of these rows."""
        begins = [sum(rows[:i]) for i in range(len(rows))]
        pairs = [(self.full[b : b + r], self.product[b : b + r]) for b, r in zip(begins, rows, strict=True)]

        def call() -> None:
            for left, out in pairs:
                torch.mm(left, self.weight, out=out)

        return call

"""One row in float8: e4m3 operands with one scale per tensor or per row, and fast accumulation, as in training.

Operands are quantized before the timing, for every variant. Two columns count it: "cast" is the quantization of this rank's
activations alone (bf16 to e4m3, per-row scaling, compiled by Inductor), "ours_cast S" is our op after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ub_overlap.runtime.ops.c10d_fallback import scaled_matmul

from ..ranks import World
from .case import Call, Case
from .collectives import RowCollectives
from .suite import SuiteRow

E4M3, MAX_E4M3 = torch.float8_e4m3fn, 448.0
FAST = True


def quantize(x: torch.Tensor, row: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return e4m3 values and their scales: [rows, 1], or [1, 1]."""
    amax = x.abs().amax(-1, keepdim=True).float()
    scale = (amax if row else amax.amax().reshape(1, 1)).clamp(min=1e-12) / MAX_E4M3
    return (x.float() / scale).clamp(-MAX_E4M3, MAX_E4M3).to(E4M3), scale


class Float8Case(Case):
    """AG: `shard` [M/R, K], `full` [M, K]; RS: `full` [M, K/R]; e4m3, quantized from the bf16 `wide`. `weight` is
    e4m3, column-major. One scale for all ranks is 1/32: values are random normal, 448 / 32 is never reached."""

    def __init__(self, row: SuiteRow, world: World, dtype: torch.dtype, collectives: RowCollectives) -> None:
        self.row, self.world, self.dtype = row, world, dtype
        self.collectives, self.ranks = collectives, collectives.ranks
        self.by_row, self.gather = row.fp8 == "row", row.kind == "AG"
        m, n, k = row.sizes(self.ranks)
        per_rank = m // self.ranks

        def empty(*sizes: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty(*sizes, device=world.device, dtype=dtype)

        weight, scale = quantize(torch.randn(n, k, device=world.device) * 0.02, self.by_row)
        self.weight, self.weight_scale = weight.t(), scale.t().contiguous()
        self.wide = empty(per_rank if self.gather else m, k)
        self.full, self.full_scale = empty(m, k, dtype=E4M3), empty(*((m, 1) if self.by_row else (1, 1)), dtype=torch.float32)
        self.shard, self.shard_scale = empty(0, dtype=E4M3), self.full_scale
        if self.gather:
            self.shard, self.shard_scale = empty(per_rank, k, dtype=E4M3), self.full_scale[:per_rank].clone()
        self.gathered = empty(m, k, dtype=E4M3) if self.gather else empty(0)
        self.gathered_scale = torch.empty_like(self.full_scale)
        self.product = empty(m, n)
        self.reduced = empty(0) if self.gather else empty(per_rank, n)
        self.refresh()

    def refresh(self) -> None:
        self.wide.normal_()
        numbers, scales = self._quantize_wide()
        mine, its_scale = (self.shard, self.shard_scale) if self.gather else (self.full, self.full_scale)
        mine.copy_(numbers)
        its_scale.copy_(scales)
        if self.gather:  # read by the matmul alone: any values of this kind
            rows = self.shard.shape[0]
            for r in range(self.ranks):
                self.full[r * rows : (r + 1) * rows].copy_(numbers)
            self.full_scale.copy_(scales.repeat(self.ranks, 1) if self.by_row else scales)

    def _quantize_wide(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self.by_row:
            return quantize(self.wide, True)
        scale = torch.full((1, 1), 1 / 32, device=self.wide.device)
        return (self.wide.float() / scale).clamp(-MAX_E4M3, MAX_E4M3).to(E4M3), scale

    def _multiply(self, left: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return scaled_matmul(left, self.weight, scale, self.weight_scale, None, self.dtype, FAST)

    def gemm(self) -> torch.Tensor:
        return self._multiply(self.full, self.full_scale)

    def collective(self) -> torch.Tensor:
        if not self.gather:
            self.collectives.scatter(self.reduced, self.product)
            return self.reduced
        self.collectives.gather(self.gathered.view(torch.uint8), self.shard.view(torch.uint8))
        if self.by_row:
            self.collectives.gather(self.gathered_scale, self.shard_scale)
        return self.gathered

    def seq(self) -> torch.Tensor:
        if self.gather:
            self.collective()
            return self._multiply(self.gathered, self.gathered_scale if self.by_row else self.shard_scale)
        self.collectives.scatter(self.reduced, self._multiply(self.full, self.full_scale))
        return self.reduced

    def torch_fused(self) -> torch.Tensor:
        ops, group, scale = torch.ops.symm_mem, self.world.group, self.weight_scale
        if self.gather:
            return ops.fused_all_gather_scaled_matmul(
                self.shard, [self.weight], self.shard_scale, [scale], 0, group, [None], [None], [self.dtype], [FAST]
            )[1][0]
        shape = [self.full.shape[0], self.weight.shape[1]]
        return ops.fused_scaled_matmul_reduce_scatter(
            self.full, self.weight, self.full_scale, scale, "sum", 0, 0, group, shape, None, None, self.dtype, FAST
        )

    def ours(self, strategy: str, group: str, keep: bool = False) -> Call:
        mine = (self.shard, self.shard_scale) if self.gather else (self.full, self.full_scale)
        run = self._op(strategy, group, self.site(strategy, keep), keep, "plain")
        return lambda: run(*mine)

    def _op(self, strategy: str, group: str, site: str, keep: bool, wire: str) -> Callable[..., torch.Tensor]:
        """Return a call of our op on quantized operands and their scales."""
        weights, scales, dtype = [self.weight], [self.weight_scale], self.dtype
        if self.gather:
            gather: Any = torch.ops.ub_overlap.all_gather_scaled_matmul.default
            return lambda x, s: gather(x, s, weights, scales, [None], 1, keep, [dtype], FAST, strategy, group, site)[2][0]
        scatter: Any = torch.ops.ub_overlap.scaled_matmul_reduce_scatter.default
        return lambda x, s: scatter([x], weights, [s], scales, None, 1, "sum", dtype, dtype, FAST, wire, strategy, group, site)

    def variants(self, strategies: Sequence[str], group: str) -> dict[str, Callable[[], Call]]:
        """Return the columns of quantization and of the float8 wire."""
        columns: dict[str, Callable[[], Call]] = {}

        def counted(strategy: str) -> Call:
            fused = torch.compile(quantize, dynamic=False)
            run = self._op(strategy, group, f"{self.site(strategy)} cast", False, "plain")
            return lambda: run(*fused(self.wide, True))

        def narrow(strategy: str) -> Call:
            run = self._op(strategy, group, f"{self.site(strategy)} wire", False, "float8")
            return lambda: run(self.full, self.full_scale)

        def cast() -> Call:
            fused = torch.compile(quantize, dynamic=False)
            return lambda: fused(self.wide, True)

        if self.by_row and self.world.cuda:
            columns["cast"] = cast
            columns |= {f"ours_cast {s}": lambda s=s: counted(s) for s in strategies}
        if not self.gather and self.row.N % 128 == 0:
            columns |= {f"ours_wire {s}": lambda s=s: narrow(s) for s in strategies}
        return columns

    def cut(self, rows: list[int]) -> Call:
        begins = [sum(rows[:i]) for i in range(len(rows))]
        pairs = [
            (self.full[b : b + r], self.full_scale[b : b + r] if self.by_row else self.full_scale)
            for b, r in zip(begins, rows, strict=True)
        ]

        def call() -> None:
            for left, scale in pairs:
                self._multiply(left, scale)

        return call

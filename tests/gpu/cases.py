"""Arguments of the ops, random, on one rank's device; how to run them, plainly too, and how far a result is from float64.

A `Maker` makes them for a group of `ranks`. A case is (op, arguments up to the strategy).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ub_overlap.runtime import reference

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SLACK = {F32: 2e-6, BF16: 4e-3, F16: 1e-3}
"""How much further from float64, in parts of the largest value, ours may be than NCCL + matmul."""

AG, RS, AR, BULK = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "bulk"
Case = tuple[str, tuple[Any, ...]]


@dataclass(frozen=True)
class Maker:
    device: torch.device
    ranks: int

    def randn(self, *sizes: int, dtype: torch.dtype = F32, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*sizes, device=self.device) * scale).to(dtype)

    def gather(
        self, dtype: torch.dtype, outer: int, m: int, q: int, modes: list[int], last: bool, keep: bool, n: int = 96
    ) -> Case:
        shard = self.randn(m, q, dtype=dtype) if last else self.randn(outer, m, q, dtype=dtype)
        rows, cols = (m, q * self.ranks) if last else (outer * self.ranks * m, q)
        sizes = [(rows if mode >= 2 else cols, n + 8 * i) for i, mode in enumerate(modes)]
        operands = [self.randn(*size, dtype=dtype, scale=0.1) for size in sizes]
        operands = [o.t().contiguous().t() if i % 2 == 0 else o for i, o in enumerate(operands)]  # a Linear's weight
        return AG, (shard, operands, modes, 1 if last else outer, last, keep)

    def scatter(self, dtype: torch.dtype, outer: int, m: int, q: int, last: bool = False, **more: Any) -> Case:
        """more: depths, bias, out_dtype, keep, by."""
        p, cols = (m, q * self.ranks) if last else (outer * self.ranks * m, q)
        depths = more.get("depths", [128])
        lhs = [self.randn(p, k, dtype=dtype) for k in depths]
        rhs = [self.randn(cols, k, dtype=dtype, scale=0.1).t() for k in depths]
        addend = self.randn(cols, dtype=dtype) if more.get("bias") else None
        out_dtype, keep = more.get("out_dtype", dtype), more.get("keep", False)
        return RS, (lhs, rhs, addend, 1 if last else outer, last, more.get("by", "sum"), out_dtype, keep)

    def reduce(self, dtype: torch.dtype, p: int, q: int, k: int, by: str = "sum", keep: bool = False) -> Case:
        return AR, ([self.randn(p, k, dtype=dtype)], [self.randn(k, q, dtype=dtype, scale=0.1)], None, by, dtype, keep)

    def bulk(self, dtype: torch.dtype, collective: str, rows: int, q: int, by: str = "sum") -> Case:
        lhs, rhs = [self.randn(128, 64, dtype=dtype)], [self.randn(64, 96, dtype=dtype)]
        return BULK, (self.randn(rows, q, dtype=dtype), lhs, rhs, collective, by)

    def kind(self, name: str, size: int = 256, dtype: torch.dtype = BF16) -> tuple[Case, str]:
        """One typical case of each op and its strategy, by a short name."""
        wide = 2 * size
        return {
            "AG": (self.gather(dtype, 1, size, wide, [0, 2], False, True), "pipelined"),
            "AG2": (self.gather(dtype, 1, size, wide, [0], False, False), f"pipelined:chunks={2 * self.ranks}"),
            "RS": (self.scatter(dtype, 1, size, wide), f"pipelined:chunks={2 * self.ranks}"),
            "RS1": (self.scatter(dtype, 1, size, wide), "pipelined"),
            "RS striped": (self.scatter(dtype, 1, size, wide), "pipelined:stripes=3"),
            "AR": (self.reduce(dtype, size + 45, size, 128), "pipelined"),
            "bulk": (self.bulk(dtype, "all_gather", size, wide), "bulk"),
            "bulk RS": (self.bulk(dtype, "reduce_scatter", size * self.ranks, wide), "bulk"),
        }[name]


def flat(results: Any) -> list[torch.Tensor]:
    return [t for r in results for t in (r if isinstance(r, list | tuple) else [r])]


def run_op(case: Case, strategy: str, group: str, site: str) -> list[torch.Tensor]:
    """All outputs, in order."""
    return flat(getattr(torch.ops.ub_overlap, case[0])(*case[1], strategy, group, site))


def run_plain(case: Case, group: str) -> list[torch.Tensor]:
    """The same outputs by a c10d collective and matmuls."""
    return flat(reference.run(case[0], *case[1], group))


def doubled(value: Any) -> Any:
    """The same arguments in float64."""
    if isinstance(value, torch.Tensor):
        return value.double()
    if isinstance(value, list):
        return [doubled(v) for v in value]
    return torch.float64 if isinstance(value, torch.dtype) else value


def run_exact(case: Case, group: str) -> list[torch.Tensor]:
    return run_plain((case[0], tuple(map(doubled, case[1]))), group)


@dataclass(frozen=True)
class Truth:
    """What a case must give: in float64, and by the plain op. Made by collectives, checked without any."""

    exact: list[torch.Tensor]
    plain: list[torch.Tensor]

    @classmethod
    def of(cls, case: Case, group: str) -> Truth:
        return cls(run_exact(case, group), run_plain(case, group))

    def check(self, ours: list[torch.Tensor], what: str = "") -> tuple[float, float]:
        """The largest errors of ours and of the plain op against float64, relative to the largest value. AssertionError where
        ours is further off than 1.5 times the plain op's and SLACK."""
        worst = worst_plain = 0.0
        for i, (a, b, c) in enumerate(zip(ours, self.plain, self.exact, strict=True)):
            where = f"{what} output {i}".strip()
            if a.shape != c.shape or a.dtype != b.dtype:
                raise AssertionError(f"{where}: {tuple(a.shape)} {a.dtype}, expected {tuple(c.shape)} {b.dtype}")
            if not a.numel():
                continue
            scale = c.abs().max().item() or 1.0
            mine, theirs = ((x.double() - c).abs().max().item() / scale for x in (a, b))
            limit = 1.5 * theirs + SLACK[a.dtype]
            if not mine <= limit:
                wrong = (~((a.double() - c).abs() / scale <= limit)).sum().item()
                raise AssertionError(f"{where}: error {mine:.3g}, plain op {theirs:.3g}; {wrong} of {a.numel()} wrong")
            worst, worst_plain = max(worst, mine), max(worst_plain, theirs)
        return worst, worst_plain


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bits, so that NaN equals itself."""
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def differs(a: list[torch.Tensor], b: list[torch.Tensor]) -> torch.Tensor:
    """Whether any bit of any output differs: a bool on the device, without waiting for it."""
    device = next(t.device for t in a)
    found = torch.zeros((), dtype=torch.bool, device=device)
    for x, y in zip(a, b, strict=True):
        if x.numel():
            found |= (bits(x) != bits(y)).any()
    return found

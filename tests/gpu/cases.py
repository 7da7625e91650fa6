"""Random op arguments on one rank's device, functions that run them, and their error against float64.

A `Maker` creates cases for a group of `ranks`. A case is (op, arguments up to the strategy).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ub_overlap.runtime import ops
from ub_overlap.runtime.ops import c10d_fallback

from . import ring_messages, split_cases

F32, BF16, F16, E4M3, E5M2 = torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2
SLACK = {F32: 2e-6, BF16: 4e-3, F16: 1e-3, E4M3: 0.0, E5M2: 0.0}
"""How much further from float64, in parts of the largest value, ours may be than NCCL + matmul."""
ROUNDINGS = 3
"""How often the largest number of a row is rounded in front of its scale: the sum over ranks, with the residual, the norm."""

AG, RS, AR, BULK = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "bulk"
SAG, SRS = "all_gather_scaled_matmul", "scaled_matmul_reduce_scatter"
FUSED = "fused_collective"
Case = tuple[str, tuple[Any, ...]]
Transposes = tuple[bool, bool]
"""(transpose_gathered, transpose_out) of one consumer of a gather."""
PLAIN, OUT_T, GATHERED_T, BOTH_T = (False, False), (False, True), (True, False), (True, True)


@dataclass(frozen=True)
class Maker:
    device: torch.device
    ranks: int

    def randn(self, *sizes: int, dtype: torch.dtype = F32, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*sizes, device=self.device) * scale).to(dtype)

    def gather(
        self,
        dtype: torch.dtype,
        outer: int,
        m: int,
        q: int,
        transposes: list[Transposes],
        last: bool,
        keep: bool,
        n: int = 96,
        independent: int = 0,
    ) -> Case:
        shard = self.randn(m, q, dtype=dtype) if last else self.randn(outer, m, q, dtype=dtype)
        rows, cols = (m, q * self.ranks) if last else (outer * self.ranks * m, q)
        sizes = [(rows if transposed else cols, n + 8 * i) for i, (transposed, _) in enumerate(transposes)]
        operands = [self.randn(*size, dtype=dtype, scale=0.1) for size in sizes]
        operands = [o.t().contiguous().t() if i % 2 == 0 else o for i, o in enumerate(operands)]  # a Linear's weight
        flags = (*map(list, zip(*transposes, strict=True)), 1 if last else outer, last, keep)
        return AG, (shard, operands, *flags, *self.independent(dtype, independent))

    def independent(self, dtype: torch.dtype, count: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the operands of `count` independent matmuls."""
        lhs = [self.randn(128 + 8 * i, 192, dtype=dtype) for i in range(count)]
        return lhs, [self.randn(96, 192, dtype=dtype, scale=0.1).t() for _ in range(count)]

    def scatter(self, dtype: torch.dtype, outer: int, m: int, q: int, last: bool = False, **more: Any) -> Case:
        """Return a scatter case. `more`: depths, bias, out_dtype, keep, by, independent."""
        p, cols = (m, q * self.ranks) if last else (outer * self.ranks * m, q)
        depths = more.get("depths", [128])
        lhs = [self.randn(p, k, dtype=dtype) for k in depths]
        rhs = [self.randn(cols, k, dtype=dtype, scale=0.1).t() for k in depths]
        addend = self.randn(cols, dtype=dtype) if more.get("bias") else None
        out_dtype, keep = more.get("out_dtype", dtype), more.get("keep", False)
        more_args = (more.get("by", "sum"), out_dtype, keep, "plain", *self.independent(dtype, more.get("independent", 0)))
        return RS, (lhs, rhs, addend, 1 if last else outer, last, *more_args)

    def reduce(
        self, dtype: torch.dtype, p: int, q: int, k: int, by: str = "sum", keep: bool = False, independent: int = 0
    ) -> Case:
        terms = [self.randn(p, k, dtype=dtype)], [self.randn(k, q, dtype=dtype, scale=0.1)]
        return AR, (*terms, None, by, dtype, keep, *self.independent(dtype, independent))

    def float8(self, *sizes: int, dtype: torch.dtype = E4M3) -> torch.Tensor:
        return self.randn(*sizes, scale=4.0).to(dtype)

    def scales(self, *sizes: int) -> torch.Tensor:
        """Return random scales from 1/16 to 1/4."""
        return torch.exp2(-2 - 2 * torch.rand(*sizes, device=self.device))

    def one_of_three_scales(self) -> torch.Tensor:
        """Return a scale [1, 1] that is not aligned to 16 bytes, as one of several that were computed together."""
        return self.scales(3)[1:2].view(1, 1)

    def scaled_gather(self, dtype: torch.dtype, outer: int, m: int, k: int, row: bool, **more: Any) -> Case:
        """Return a scaled gather case. Per-tensor scales are 1/8 on all ranks.

        `more`: keep, widths, bias, types (of the shard and of the operands).
        """
        widths, (left, right) = more.get("widths", [96]), more.get("types", (E4M3, E4M3))
        operands = [self.float8(n, k, dtype=right).t() for n in widths]
        shard_scale = self.scales(outer * m, 1) if row else torch.full((), 0.125, device=self.device)
        operand_scales = [self.scales(1, n) if row else self.one_of_three_scales() for n in widths]
        biases = [self.randn(n, dtype=dtype) if more.get("bias") else None for n in widths]
        shard = self.float8(outer, m, k, dtype=left)
        keep, fast = more.get("keep", False), more.get("fast", False)
        return SAG, (shard, shard_scale, operands, operand_scales, biases, outer, keep, [dtype for _ in widths], fast)

    def scaled_scatter(self, dtype: torch.dtype, outer: int, m: int, q: int, row: bool, **more: Any) -> Case:
        """Return a scaled scatter case. `more`: depths, bias, out_dtype, by, wire, types (of left and right operands)."""
        p, depths, (left, right) = outer * self.ranks * m, more.get("depths", [128]), more.get("types", (E4M3, E4M3))
        lhs = [self.float8(p, k, dtype=left) for k in depths]
        rhs = [self.float8(q, k, dtype=right).t() for k in depths]
        lhs_scales = [self.scales(p, 1) if row else self.one_of_three_scales() for _ in depths]
        rhs_scales = [self.scales(1, q) if row else self.scales(1) for _ in depths]
        addend = self.randn(q, dtype=dtype) if more.get("bias") else None
        kinds = (dtype, more.get("out_dtype", dtype), more.get("fast", False), more.get("wire", "plain"))
        return SRS, (lhs, rhs, lhs_scales, rhs_scales, addend, outer, more.get("by", "sum"), *kinds)

    def bulk(
        self, dtype: torch.dtype, collective: str, rows: int, q: int, by: str = "sum", out_dtype: torch.dtype | None = None
    ) -> Case:
        lhs, rhs = [self.randn(128, 64, dtype=dtype)], [self.randn(64, 96, dtype=dtype)]
        return BULK, (self.randn(rows, q, dtype=dtype), lhs, rhs, collective, by, out_dtype or dtype)

    def fused(
        self,
        dtype: torch.dtype,
        rows: int,
        cols: int,
        collective: str = "all_reduce",
        norm: str = "rms",
        by: str = "sum",
        residual: bool = True,
        weight: bool = True,
        rounded: bool = False,
        scale: torch.dtype | None = None,
        by_row: bool = False,
        round_sum: bool = True,
        divides: bool = False,
        offset: float = 0.0,
        linear_bias: bool = False,
        branch_norm: str = "none",
        factor: float = 1.0,
        addend: bool = False,
    ) -> Case:
        """A collective of few tokens. `rows`: of a rank's result (all_gather: of its shard).

        `scale`: the float8 format of the normed rows. `by_row`: each has its own scale. `offset`: of the weights.
        `linear_bias`, `branch_norm`, `factor`, `addend`: of the branch.
        """
        has_norm = norm != "none"
        x = self.randn(rows * self.ranks if collective == "reduce_scatter" else rows, cols, dtype=dtype)
        other = self.randn(rows, cols, dtype=dtype) if residual else None
        vector = self.randn(cols, dtype=dtype) if weight and has_norm else None
        bias = self.randn(cols, dtype=dtype) if weight and norm == "layer" else None
        one = torch.full((), 0.03125, device=self.device) if scale and not by_row else None
        rows_scales = (1.0 / torch.finfo(scale).max, 2.0**-120) if scale and by_row else (0.0, 0.0)
        vectors = [self.randn(cols, dtype=dtype) for _ in range(3)]
        branch = (
            vectors[0] if linear_bias else None, branch_norm, vectors[1] if weight and branch_norm != "none" else None,
            vectors[2] if weight and branch_norm == "layer" else None, 1e-4, rounded, offset, factor,
            self.randn(rows, cols, dtype=dtype) if addend else None,
        )  # fmt: skip
        return FUSED, (
            x, collective, by, *branch, other, norm, vector, bias, 1e-5, round_sum, rounded, offset, one, *rows_scales, divides,
            scale or dtype,
        )  # fmt: skip

    def kind(self, name: str, size: int = 256, dtype: torch.dtype = BF16) -> tuple[Case, str]:
        """Return a typical case and its strategy by a short name."""
        if name in split_cases.KINDS:
            return split_cases.make_kind(self, name, size, dtype)
        wide = 2 * size
        round_up = -(-wide // 128) * 128
        return {
            "AG": (self.gather(dtype, 1, size, wide, [PLAIN, GATHERED_T], False, True), "pipelined"),
            "AG2": (self.gather(dtype, 1, size, wide, [PLAIN], False, False), f"pipelined:chunks={2 * self.ranks}"),
            "AG engine": (self.gather(dtype, 1, size, wide, [PLAIN, GATHERED_T], False, True), "pipelined:copies=engine"),
            "RS": (self.scatter(dtype, 1, size, wide), f"pipelined:chunks={2 * self.ranks}"),
            "RS1": (self.scatter(dtype, 1, size, wide), "pipelined"),
            "RS striped": (self.scatter(dtype, 1, size, wide), "pipelined:stripes=3"),
            "RS direct": (self.scatter(dtype, 1, size, wide), "direct"),
            "RS direct 3": (self.scatter(dtype, 3, size, wide, bias=True), "direct"),
            "AR direct": (self.reduce(dtype, size + 45, size, 128), "direct"),
            "AR": (self.reduce(dtype, size + 45, size, 128), "pipelined"),
            "SAG": (self.scaled_gather(dtype, 1, size, round_up, True, keep=True), "pipelined"),
            "SAG2": (self.scaled_gather(dtype, 1, size, round_up, False, bias=True), f"pipelined:chunks={2 * self.ranks}"),
            "SRS": (self.scaled_scatter(dtype, 1, size, round_up, True), f"pipelined:chunks={2 * self.ranks}"),
            "SRS wire": (self.scaled_scatter(dtype, 1, size, round_up, False, wire="float8"), "pipelined"),
            "SRS striped": (self.scaled_scatter(dtype, 1, size, round_up, True, wire="float8"), "pipelined:stripes=3"),
            "bulk": (self.bulk(dtype, "all_gather", size, wide), "bulk"),
            "one_shot": (self.fused(dtype, 5, wide), "one_shot"),
            "two_shot": (self.fused(dtype, 70, wide, norm="layer"), "two_shot"),
            "bulk RS": (self.bulk(dtype, "reduce_scatter", size * self.ranks, wide), "bulk"),
            "message": (ring_messages.message(self.randn(size, wide, dtype=dtype)), ""),
        }[name]


def flat(results: Any) -> list[torch.Tensor]:
    if isinstance(results, torch.Tensor):
        return [results]
    return [t for r in results for t in (r if isinstance(r, list | tuple) else [r])]


def run_op(case: Case, strategy: str, group: str, site: str) -> list[torch.Tensor]:
    """Run our op, or both ops of a split collective, and return all outputs in order."""
    if case[0] in split_cases.FINISH:
        return split_cases.finish(split_cases.start(case, strategy, group, site), case, strategy, group, site)
    if case[0] == ring_messages.MESSAGE:
        return ring_messages.pass_on(case, group)
    return flat(getattr(torch.ops.ub_overlap, case[0])(*case[1], strategy, group, site))


def run_plain(case: Case, group: str) -> list[torch.Tensor]:
    """Compute the same outputs with a c10d collective and matmuls."""
    if case[0] in split_cases.FINISH:
        return split_cases.run_plain(case, group)
    return flat(ops.run_fallback(case[0], *case[1], "none", group, "/fallback"))


def doubled(value: Any) -> Any:
    """Return the same arguments in float64."""
    if isinstance(value, torch.Tensor):
        return value.double()
    if isinstance(value, list):
        return [doubled(v) for v in value]
    return torch.float64 if isinstance(value, torch.dtype) else value


def run_exact(case: Case, group: str) -> list[torch.Tensor]:
    return run_plain((case[0], tuple(map(doubled, case[1]))), group)


def sizes_of_parts(case: Case, group: str) -> torch.Tensor:
    """Return the sum of absolute contributions of all ranks to each element of a sum over ranks, in float64."""
    if case[0] == SRS:
        lhs, rhs, lhs_scales, rhs_scales, partial, outer = map(doubled, case[1][:6])
        for a, b, a_scale, b_scale in zip(lhs, rhs, lhs_scales, rhs_scales, strict=True):
            partial = c10d_fallback.scaled_matmul(a, b, a_scale, b_scale, partial, torch.float64, False)
        return c10d_fallback.scatter_rows(partial.abs(), outer, group)
    lhs, rhs, addend, *rest = case[1]
    partial = sum(a.double() @ b.double() for a, b in zip(lhs, rhs, strict=True))
    partial = partial if addend is None else partial + addend.double()
    identity = torch.eye(partial.shape[-1], dtype=partial.dtype, device=partial.device)  # as operand: the op's own layout
    return run_exact((case[0], ([partial.abs()], [identity], None, *rest)), group)[0]


def rounding_of_parts(case: Case, group: str, exact: torch.Tensor) -> float:
    """Return what rounding the parts of all ranks may add to their sum, in parts of its largest value.

    Parts may cancel: the sum is then much smaller than what was rounded.
    """
    rounding = 0.0
    if case[0] == SRS and case[1][-1] == "float8":
        rounding = 2.0**-4
    elif case[0] in (RS, AR) and case[1][0][0].dtype in (BF16, F16):
        rounding = torch.finfo(case[1][0][0].dtype).eps / 2
    if not rounding or not exact.numel():
        return 0.0
    return rounding * sizes_of_parts(case, group).max().item() / (exact.abs().max().item() or 1.0)


@dataclass(frozen=True)
class Truth:
    """Expected outputs of a case, in float64 and from the c10d op. Construction is collective, checks are not."""

    exact: list[torch.Tensor]
    plain: list[torch.Tensor]
    wire: float = 0.0
    """What rounding the parts of a sum may add, in parts of its largest value: 2^-4 of each on a float8 wire."""
    rounded: torch.dtype = F32
    """The type in which values were rounded, ROUNDINGS times, that an fp32 output is computed from, as scales of rows are."""

    @classmethod
    def of(cls, case: Case, group: str) -> Truth:
        exact = run_exact(case, group)
        wire = rounding_of_parts(case, group, exact[0])
        return cls(exact, run_plain(case, group), wire, case[1][0].dtype if case[0] == FUSED else F32)

    def check(self, ours: list[torch.Tensor], what: str = "") -> tuple[float, float]:
        """Return the largest relative errors of our op and of the c10d op against float64. AssertionError if
        ours exceeds 1.5 times the c10d op's error plus SLACK."""
        worst = worst_plain = 0.0
        for i, (a, b, c) in enumerate(zip(ours, self.plain, self.exact, strict=True)):
            where = f"{what} output {i}".strip()
            if a.shape != c.shape or a.dtype != b.dtype:
                raise AssertionError(f"{where}: {tuple(a.shape)} {a.dtype}, expected {tuple(c.shape)} {b.dtype}")
            if not a.numel():
                continue
            scale = c.abs().max().item() or 1.0
            mine, theirs = ((x.double() - c).abs().max().item() / scale for x in (a, b))
            limit = 1.5 * theirs + SLACK[a.dtype] + self.wire
            if a.dtype is F32 and self.rounded is not F32:
                limit += ROUNDINGS * torch.finfo(self.rounded).eps / 2
            if not mine <= limit:
                wrong = (~((a.double() - c).abs() / scale <= limit)).sum().item()
                raise AssertionError(f"{where}: error {mine:.3g}, plain op {theirs:.3g}; {wrong} of {a.numel()} wrong")
            worst, worst_plain = max(worst, mine), max(worst_plain, theirs)
        return worst, worst_plain


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's bits, so that NaN equals itself."""
    return tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def differs(a: list[torch.Tensor], b: list[torch.Tensor]) -> torch.Tensor:
    """Return a device bool: whether any bit of any output differs. Does not wait for the device."""
    device = next(t.device for t in a)
    found = torch.zeros((), dtype=torch.bool, device=device)
    for x, y in zip(a, b, strict=True):
        if x.numel():
            found |= (bits(x) != bits(y)).any()
    return found

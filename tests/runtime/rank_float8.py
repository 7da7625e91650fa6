"""Rank functions of test_float8_ops.py: the float8 ops against fp64, within error bounds derived from the formats.

Inputs are exact: they are float8 numbers, and a product of two fits fp32. The error of a result comes from
    sums      fp32, any order: (K - 1) u32 of the sum of absolute values, and u32 for each scale and for the addend
    rounding  u of the rounded type, times the absolute value, or half the smallest representable number
    wire      e4m3 with a scale: 2^-4 of a number's absolute value, or 2^-10 of its segment's scale, which is amax / 448
with u half of the type's eps. `Bounded` propagates an exact value and its error bound through the steps of an op.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ub_overlap.runtime import errors, ops, settings
from ub_overlap.runtime.schedule.encode import provide
from ub_overlap.runtime.session import session

from . import oracle, rank_ops, rank_sessions
from .oracle import data

OPS = torch.ops.ub_overlap
C = ops.extension()
E4M3, E5M2, F32, BF16, F16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float32, torch.bfloat16, torch.float16
PAIRS = ((E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2))
U32 = torch.finfo(F32).eps / 2


@dataclass(frozen=True)
class Bounded:
    """An exact result and its elementwise error bound, both fp64."""

    exact: Tensor
    off: Tensor

    def size(self) -> Tensor:
        """Return the largest absolute value that the computed number can have."""
        return self.exact.abs() + self.off

    def rounded(self, dtype: torch.dtype) -> Bounded:
        info = torch.finfo(dtype)
        return Bounded(self.exact, self.off + self.size() * info.eps / 2 + info.smallest_normal * info.eps / 2)

    def wired(self) -> Bounded:
        """Return the value after the float8 wire, which scales segments of 128 elements."""
        largest = self.size().unflatten(-1, (-1, 128)).amax(-1, keepdim=True).expand(-1, -1, 128).flatten(-2)
        off = self.size() * 2.0**-4 + largest / 448 * 2.0**-10 + 2.0**-126
        return Bounded(self.exact, self.off + off * (1 + 8 * U32))

    def __add__(self, other: Bounded) -> Bounded:
        """Return the fp32 sum."""
        return Bounded(self.exact + other.exact, (self.off + other.off) + (self.size() + other.size()) * U32)

    def share(self, outer: int, ranks: int, rank: int) -> Bounded:
        """Return the rows of the shard of `rank`."""
        rows, cols = self.exact.shape
        block = rows // (outer * ranks) if outer else 0
        cut = [x.reshape(outer, ranks, block, cols)[:, rank].reshape(outer * block, cols) for x in (self.exact, self.off)]
        return Bounded(*cut)

    def far(self, name: str, got: Tensor, dtype: torch.dtype) -> list[str]:
        if got.dtype != dtype or tuple(got.shape) != tuple(self.exact.shape) or not got.is_contiguous():
            return [f"{name}: {got.dtype} {tuple(got.shape)} {got.stride()}, expected {dtype} {tuple(self.exact.shape)}"]
        wrong = ~((got.double() - self.exact).abs() <= self.off)
        if not bool(wrong.any()):
            return []
        at = tuple(wrong.nonzero()[0].tolist())
        return [f"{name}: {int(wrong.sum())} off, at {at} {got[at]} for {self.exact[at]:.9g} +- {self.off[at]:.3g}"]


def scaled(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor) -> Bounded:
    """Return the scaled product a [M, K] @ b [K, N] in fp32."""
    factor = a_scale.double().reshape(-1, 1) * b_scale.double().reshape(1, -1)
    sizes = (a.double().abs() @ b.double().abs()) * factor
    return Bounded((a.double() @ b.double()) * factor, sizes * U32 * (a.shape[1] + 2) * 1.001)


def exactly(value: Tensor) -> Bounded:
    return Bounded(value.double(), torch.zeros(value.shape, dtype=torch.float64))


def numbers(*sizes: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Return numbers over many binades, with outliers. The first row is zero, the second has one sign."""
    spread = data(*sizes, seed=seed) * torch.exp2((data(*sizes, seed=seed + 1) * 3).round())
    if sizes and sizes[0] > 2:
        spread[0] = 0
        spread[1] = spread[1].abs()
    most = torch.finfo(dtype).max
    return spread.clamp(-most, most).to(dtype)


def factors(count: int, seed: int) -> Tensor:
    """Return scales over several binades, small enough for products to fit fp16."""
    return torch.exp2(data(count, seed=seed) - 9).float()


def scales_of(lines: int, row: bool, seed: int, column: bool) -> Tensor:
    if not row:
        return factors(1, seed)[0] if seed % 2 else factors(1, seed).reshape(1, 1)
    return factors(lines, seed).reshape((lines, 1) if column else (1, lines))


def weight(k: int, n: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Return a column-major [K, N] weight."""
    return numbers(n, k, dtype=dtype, seed=seed).t()


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.view(torch.uint8))


# ---- gathers ----------------------------------------------------------------------------------------------------------------


def gather_case(
    rank: int, world: int, types: tuple[torch.dtype, torch.dtype], row: bool, outer: int, m: int, k: int,
    outs: Sequence[tuple[int, torch.dtype, bool]], keep: bool, strategy: str, seed: int, group: str = "",
) -> list[str]:  # fmt: skip
    """Run one gather and check it. `outs`: (N, dtype, has a bias) of each consumer."""
    shards = [numbers(outer * m, k, dtype=types[0], seed=seed + 7 * r) for r in range(world)]
    scales = [scales_of(outer * m, row, seed if not row else seed + r, True) for r in range(world)]
    operands = [weight(k, n, types[1], seed + 50 + j) for j, (n, _, _) in enumerate(outs)]
    operand_scales = [scales_of(n, row, seed + 60 + j, False) for j, (n, _, _) in enumerate(outs)]
    biases = [data(n, seed=seed + 70 + j).to(dtype) if bias else None for j, (n, dtype, bias) in enumerate(outs)]
    dtypes = [dtype for _, dtype, _ in outs]
    mine = shards[rank] if seed % 3 else shards[rank].t().contiguous().t()  # not contiguous
    whole, whole_scale, products = OPS.all_gather_scaled_matmul(
        mine, scales[rank], operands, operand_scales, biases, outer, keep, dtypes, False, strategy, group or rank_ops.group(),
        f"/float8.ag.{seed}",
    )  # fmt: skip
    name = f"gather {types} {'row' if row else 'tensor'} outer={outer} m={m} k={k} {strategy}"
    want = oracle.gathered([s.view(torch.uint8) for s in shards], outer, False).view(types[0])
    want_scale = oracle.gathered(scales, outer, False) if row else scales[0]
    bad = []
    if not (same(whole, want) if keep else tuple(whole.shape) == (0,)):
        bad.append(f"{name}: gathered differs")
    if not (torch.equal(whole_scale, want_scale) if keep and row else tuple(whole_scale.shape) == (0,)):
        bad.append(f"{name}: gathered_scale differs")
    for j, (product, dtype) in enumerate(zip(products, dtypes, strict=True)):
        exact = scaled(want, operands[j], want_scale, operand_scales[j])
        bias = biases[j]
        if bias is not None:
            exact = exact + exactly(bias.double().expand(exact.exact.shape))
        bad += exact.rounded(dtype).far(f"{name} out {j}", product, dtype)
        if row and bias is None and want.shape[0] > 2 and product.numel() and whole_rows_differ(want_scale):
            off = scaled(want, operands[j], want_scale.roll(1, 0), operand_scales[j]).rounded(dtype)
            bad += [] if off.far("", product, dtype) else [f"{name}: the scales of other rows would do as well"]
    return bad


def whole_rows_differ(scale: Tensor) -> bool:
    return bool((scale / scale.roll(1, 0) - 1).abs().max() > 0.1)


def gathers(rank: int, world: int) -> list[str]:
    bad: list[str] = []
    seed = 100
    consumers = ((16, BF16, True), (32, F32, False), (48, F16, True), (16, F32, True))
    strategies = ("pipelined", *(f"pipelined:chunks={n}" for n in (1, 2, 4, 8)), "pipelined:chunks=8:copies=engine")
    for strategy, row, types in itertools.product(strategies, (False, True), PAIRS):
        for outer, m, k in ((1, 12, 64), (3, 5, 32), (20, 1, 16)):
            seed += 100
            keep = seed % 200 == 0
            bad += gather_case(rank, world, types, row, outer, m, k, consumers[: 1 + seed // 100 % 4], keep, strategy, seed)
    for outer, m, k, n in ((1, 0, 16, 16), (1, 3, 0, 16), (0, 3, 16, 16), (1, 3, 16, 0), (1, 1, 16, 16)):
        for row in (False, True):
            seed += 100
            bad += gather_case(rank, world, PAIRS[0], row, outer, m, k, ((n, BF16, True),), True, "pipelined", seed)
    bad += gather_case(rank, world, PAIRS[0], True, 2, 3, 16, (), True, "pipelined", seed + 100)
    inputs = [numbers(5, 3, dtype=E5M2, seed=r) for r in range(world)]
    out, _ = OPS.bulk(inputs[rank], [], [], "all_gather", "sum", E5M2, "bulk", rank_ops.group(), "/float8.bulk")
    return bad if same(out, torch.cat([i.view(torch.uint8) for i in inputs]).view(E5M2)) else [*bad, "bulk: bytes differ"]


# ---- scatters ---------------------------------------------------------------------------------------------------------------


def partial_of(
    terms: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]], addend: Tensor | None, dtype: torch.dtype, sizes: tuple[int, int]
) -> Bounded:
    """Return a rank's partial product: the sum of its terms, rounded to `dtype` after each."""
    total = None if addend is None else exactly(addend.double().expand(sizes))
    for a, b, a_scale, b_scale in terms:
        term = scaled(a, b, a_scale, b_scale)
        total = (term if total is None else total + term).rounded(dtype)
    assert total is not None
    return total


def scattered(partials: Sequence[Bounded], outer: int, rank: int, wire: str, by: str, out_dtype: torch.dtype) -> Bounded:
    """Return the shard of the sum that `rank` owns."""
    total: Bounded | None = None
    for r, partial in enumerate(partials):
        part = partial.share(outer, len(partials), rank)
        part = part.wired() if wire == "float8" and r != rank else part
        total = part if total is None else total + part
    assert total is not None
    if by == "avg":
        total = Bounded(total.exact / len(partials), total.off / len(partials) + total.size() * U32)
    return total.rounded(out_dtype)


def scatter_case(
    rank: int, world: int, types: tuple[torch.dtype, torch.dtype], row: bool, outer: int, m: int, ks: Sequence[int], q: int,
    dtypes: tuple[torch.dtype, torch.dtype], wire: str, by: str, addend_dims: int, strategy: str, seed: int, group: str = "",
    sent: str = "",
) -> list[str]:  # fmt: skip
    """Run one scatter and check it. `dtypes`: of product and result. `sent`: the wire format if it differs from `wire`."""
    p = outer * world * m
    everyone, addends = [], []
    for r in range(world):
        at = seed + 1000 * r
        everyone.append([
            (numbers(p, k, dtype=types[0], seed=at + t), weight(k, q, types[1], at + 30 + t),
             scales_of(p, row, at + 60 + t, True), scales_of(q, row, at + 90 + t, False))
            for t, k in enumerate(ks)
        ])  # fmt: skip
        addends.append([None, data(q, seed=at + 5).to(dtypes[0]), data(p, q, seed=at + 5).to(dtypes[0])][addend_dims])
    partials = [partial_of(t, a, dtypes[0], (p, q)) for t, a in zip(everyone, addends, strict=True)]
    lhs, rhs, lhs_scales, rhs_scales = map(list, zip(*everyone[rank], strict=True))
    out = OPS.scaled_matmul_reduce_scatter(
        lhs, rhs, lhs_scales, rhs_scales, addends[rank], outer, by, *dtypes, False, wire, strategy, group or rank_ops.group(),
        f"/float8.rs.{seed}",
    )  # fmt: skip
    name = f"scatter {types} {'row' if row else 'tensor'} outer={outer} m={m} ks={ks} q={q} {dtypes} {wire} {by} {strategy}"
    want = scattered(partials, outer, rank, sent or wire, by, dtypes[1])
    bad = want.far(name, out, dtypes[1])
    if wire == "float8" and not sent and p and not bad:  # a float8 wire rounds: the error must exceed a plain bound
        close = scattered(partials, outer, rank, "plain", by, dtypes[1])
        if not close.far("", out, dtypes[1]):
            bad.append(f"{name}: nothing was rounded to float8")
    return bad


def scatters(rank: int, world: int) -> list[str]:
    bad: list[str] = []
    seed = 1_000_000
    strategies = ("pipelined", *(f"pipelined:chunks={n}" for n in (1, 2, 4, 8)), "pipelined:stripes=1", "pipelined:stripes=3")
    dtypes = ((BF16, BF16), (F32, F32), (F16, F32), (BF16, F32))
    for strategy, wire, row in itertools.product(strategies, ("plain", "float8"), (False, True)):
        for outer, m, ks, by, addend in ((1, 6, [64], "sum", 0), (3, 2, [32, 48], "avg", 1), (1, 5, [16], "sum", 2)):
            seed += 10_000
            pick = seed // 10_000
            q = 128 * (1 + pick % 2) if wire == "float8" else 48
            bad += scatter_case(
                rank, world, PAIRS[pick % 3], row, outer, m, ks, q, dtypes[pick % 4], wire, by, addend, strategy, seed
            )
    for outer, m, k, q in ((1, 0, 16, 128), (0, 1, 16, 128), (1, 2, 0, 128), (1, 2, 16, 0)):
        seed += 10_000
        bad += scatter_case(rank, world, PAIRS[0], False, outer, m, [k], q, (BF16, BF16), "plain", "sum", 1, "pipelined", seed)
    return bad


def wire(rank: int, world: int) -> list[str]:
    """A single rank's contribution arrives bitwise as the format defines. The owner's own contribution is not rounded."""
    bad = []
    values = numbers(4 * world, 256, dtype=E5M2, seed=3).to(F32) * torch.exp2(torch.arange(4 * world).float() * 4 - 60)[:, None]
    values[2, 128:] = 0
    for dtype, sender in itertools.product((F32, BF16), range(world)):
        exact = values.to(dtype)
        lhs = torch.eye(4 * world, dtype=dtype) if rank == sender else torch.zeros(4 * world, 4 * world, dtype=dtype)
        out, partial, _ = OPS.matmul_reduce_scatter(
            [lhs], [exact], None, 1, False, "sum", F32, True, "float8", [], [], "pipelined", rank_ops.group(),
            f"/wire.{dtype}.{sender}",
        )  # fmt: skip
        mine = exact[4 * rank : 4 * rank + 4].float()
        segments = mine.unflatten(1, (2, 128))
        scale = (segments.abs().amax(2, keepdim=True) / 448).clamp(min=torch.finfo(F32).smallest_normal)
        rounded = ((segments * (1 / scale)).to(E4M3).float() * scale).flatten(1)
        if not torch.equal(out, mine if rank == sender else rounded):
            bad.append(f"wire {dtype} from {sender}: {int((out != (mine if rank == sender else rounded)).sum())} differ")
        if not torch.equal(partial, exact if rank == sender else torch.zeros_like(exact)):
            bad.append(f"wire {dtype}: partial differs")
        if rank != sender and torch.equal(rounded, mine):
            bad.append("wire: the values chosen need no rounding")
    return bad


def unusual(rank: int, world: int) -> list[str]:
    """NaN and infinity are transmitted. A float8 wire changes an infinity into NaN and leaves its neighbours unchanged."""
    bad, name = [], rank_ops.group()
    shards = [torch.ones(4, 16).to(E5M2) for _ in range(world)]
    shards[0][1, 3], shards[-1][2, 5] = torch.inf, torch.nan
    one, column = torch.ones(()), torch.ones(16, 16).to(E4M3).t()
    _, _, (out,) = OPS.all_gather_scaled_matmul(
        shards[rank], one, [column], [one], [None], 1, False, [BF16], False, "pipelined", name, "/odd.ag"
    )
    want = (torch.cat([s.float() for s in shards]) @ column.float()).to(BF16)
    if not torch.equal(out.nan_to_num(nan=-1.0), want.nan_to_num(nan=-1.0)) or not bool(out.isinf().any() & out.isnan().any()):
        bad.append(f"gather: {out[:, 0].tolist()}, expected {want[:, 0].tolist()}")
    for how in ("plain", "float8"):
        lhs = torch.ones(2 * world, 16)
        rhs = torch.ones(128, 16)
        if rank == 0:
            rhs[7, 0], lhs[:, 0] = torch.inf, 1.0
        out = OPS.scaled_matmul_reduce_scatter(
            [lhs.to(E4M3)], [rhs.to(E5M2).t()], [one], [one], None, 1, "sum", BF16, F32, False, how, "pipelined", name,
            f"/odd.{how}",
        )  # fmt: skip
        odd = torch.full((2,), torch.inf if how == "plain" or rank == 0 else torch.nan)
        rest = torch.cat([out[:, :7], out[:, 8:]], 1)
        if not torch.equal(out[:, 7].nan_to_num(nan=-1.0), odd.nan_to_num(nan=-1.0)):
            bad.append(f"scatter {how}: {out[:, 7].tolist()}, expected {odd.tolist()}")
        if not torch.equal(rest, torch.full_like(rest, 16.0 * world)):
            bad.append(f"scatter {how}: {rest.unique().tolist()} next to it")
    # The largest products of e4m3 are too large for fp16: infinite there, and finite in bf16.
    top = torch.full((world, 16), 448.0).to(E4M3)
    for dtype, finite in ((F16, False), (BF16, True)):
        out = OPS.scaled_matmul_reduce_scatter(
            [top], [top[:1].expand(16, 16).contiguous().t()], [one], [one], None, 1, "sum", dtype, F32, False, "plain",
            "pipelined", name, f"/top.{dtype}",
        )  # fmt: skip
        if bool(out.isfinite().all()) != finite:
            bad.append(f"the largest products in {dtype}: {out[0, 0]}")
    return bad


def refusals(rank: int, world: int) -> list[str]:
    """Invalid arguments raise an error with a specific text before any communication."""
    name, one, bad = rank_ops.group(), torch.ones(()), []
    shard, column = torch.zeros(4, 16).to(E4M3), torch.zeros(16, 16).to(E4M3).t()

    def gather(x: Tensor = shard, xs: Tensor = one, b: Tensor = column, bs: Tensor = one, bias: Tensor | None = None) -> None:
        OPS.all_gather_scaled_matmul(x, xs, [b], [bs], [bias], 1, False, [BF16], False, "pipelined", name, "/refused")

    def scatter(b: Tensor = column, how: str = "plain", xs: Tensor = one, bs: Tensor = one) -> None:
        lhs = torch.zeros(world, 16).to(E4M3)
        OPS.scaled_matmul_reduce_scatter(
            [lhs], [b], [xs], [bs], None, 1, "sum", BF16, BF16, False, how, "pipelined", name, "/refused"
        )

    tries = (
        ("divide by 16", lambda: gather(torch.zeros(4, 24).to(E4M3), b=torch.zeros(16, 24).to(E4M3).t())),
        ("divide by 16", lambda: scatter(torch.zeros(8, 16).to(E4M3).t())),
        ("e5m2 by float8_e5m2", lambda: gather(shard.to(F32).to(E5M2), b=column.to(F32).to(E5M2))),
        ("not column-major", lambda: gather(b=torch.zeros(16, 32).to(E4M3))),
        ("dtype is not supported", lambda: gather(torch.zeros(4, 16))),
        ("another dtype", lambda: gather(xs=torch.ones((), dtype=BF16))),
        ("do not fit", lambda: gather(xs=torch.ones(4, 1))),
        ("do not fit", lambda: gather(bs=torch.ones(1, 16))),
        ("a bias has another dtype", lambda: gather(bias=torch.ones(16))),
        ("a bias does not fit", lambda: gather(bias=torch.ones(8, dtype=BF16))),
        ("do not fit", lambda: scatter(xs=torch.ones(world + 1, 1), bs=torch.ones(1, 16))),
        ("segments of a float8 wire", lambda: scatter(how="float8")),
        ("wire is unknown", lambda: scatter(how="narrow")),
    )
    for words, attempt in tries:
        try:
            attempt()
            bad.append(f"{words}: not refused")
        except errors.OptionError as error:
            bad += [] if words in str(error) else [f"expected '{words}', got: {error}"]
    return bad


def mismatched(rank: int, world: int) -> list[str]:
    """Ranks that differ in scaling, wire or dtype get an error that names the difference."""
    bad = []
    one, each, column = torch.ones(()), torch.ones(4, 1), torch.zeros(16, 16).to(E4M3).t()

    def gather(name: str, row: bool, x: torch.dtype = E4M3) -> None:
        bs = torch.ones(1, 16) if row else one
        shard = torch.zeros(4, 16).to(x)
        OPS.all_gather_scaled_matmul(
            shard, each if row else one, [column], [bs], [None], 1, False, [BF16], False, "pipelined", name, "/mixed"
        )

    def scatter(name: str, how: str) -> None:
        lhs, rhs = torch.zeros(world, 16).to(E4M3), torch.zeros(128, 16).to(E4M3).t()
        OPS.scaled_matmul_reduce_scatter(
            [lhs], [rhs], [one], [one], None, 1, "sum", BF16, BF16, False, how, "pipelined", name, "/mixed"
        )

    tries = (
        ("scaling", lambda name: gather(name, rank == 0)),
        ("e5m2", lambda name: gather(name, False, E4M3 if rank == 0 else E5M2)),
        ("wire", lambda name: scatter(name, "plain" if rank == 0 else "float8")),
    )
    with rank_sessions.reset():
        settings.configure(step_timeout_s=20.0)
        for words, attempt in tries:
            name = dist.new_group(list(range(world))).group_name
            try:
                attempt(name)
                bad.append(f"{words}: no rank noticed")
            except errors.ShapeMismatchError as error:
                bad += [] if words in str(error) else [f"expected '{words}', got: {error}"]
            dist.barrier()
            session.close(name)
    return bad


def plain(rank: int, world: int) -> list[str]:
    """The c10d fallback meets the same bounds. There a float8 wire sends the products in their own type."""
    with rank_sessions.reset():
        C.testing.set_host_id(f"host{rank}:boot:1")
        name = dist.new_group(list(range(world))).group_name
        bad, outs = [], ((16, BF16, True), (32, F32, False))
        for row in (False, True):
            bad += gather_case(rank, world, PAIRS[1], row, 2, 3, 32, outs, True, "pipelined", 31 + row, name)
            # gloo sums in the type of the products: fp32 here, as the bound assumes
            bad += scatter_case(
                rank, world, PAIRS[0], row, 1, 3, [32, 16], 128, (F32, BF16), "float8", "sum", 1, "pipelined", 77 + row, name,
                "plain",
            )  # fmt: skip
        inputs = torch.full((2, 3), float(rank)).to(E4M3)
        out, _ = OPS.bulk(inputs, [], [], "all_gather", "sum", E4M3, "bulk", name, "/float8.plain")
        if out.float().sum() != 6 * sum(range(world)):
            bad.append(f"bulk: {out}")
        return bad


def checked(rank: int, world: int) -> list[str]:
    """The ops pass torch.library.opcheck without test_schema, whose float8 comparisons have no kernels in torch."""
    name, tests = rank_ops.group(), ("test_faketensor", "test_aot_dispatch_dynamic")
    one, column = torch.ones(()), numbers(16, 16, dtype=E4M3, seed=1).t()
    for row in (False, True):
        xs, ws = (torch.ones(4 * world, 1), torch.ones(1, 16)) if row else (one, one)
        shard, lhs = numbers(4, 16, dtype=E4M3, seed=rank), numbers(4 * world, 16, dtype=E4M3, seed=rank)
        args = (shard, xs[:4] if row else xs, [column] * 2, [ws] * 2, [None, torch.ones(16)], 1, row, [BF16, F32], True)
        torch.library.opcheck(OPS.all_gather_scaled_matmul.default, (*args, "pipelined", name, "/c8"), test_utils=tests)
        more = (torch.ones(16, dtype=BF16), 1, "avg", BF16, F32, True, "plain", "pipelined", name, "/c8")
        torch.library.opcheck(OPS.scaled_matmul_reduce_scatter.default, ([lhs], [column], [xs], [ws], *more), test_utils=tests)
    return []


def everything(rank: int, world: int) -> dict[str, list[str]]:
    """Run all of the above. Proofs of pairs of schedules are omitted, as in rank_ops."""
    C.set_provider(provide)
    try:
        found = {f.__name__: f(rank, world)[:10] for f in (gathers, scatters, wire, unusual, refusals)}
        if world == 2:
            found |= {f.__name__: f(rank, world)[:10] for f in (mismatched, plain, checked)}
        return found
    finally:
        C.set_provider(ops.ScheduleProvider())

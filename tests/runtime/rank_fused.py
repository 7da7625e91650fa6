"""Rank functions of test_fused.py: fused collectives in random orders, with other calls between, delays and faults."""

from __future__ import annotations

import os
import random
import threading
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

import ub_overlap
from ub_overlap.runtime import ops, settings
from ub_overlap.runtime.fp8.numerics import FLOAT8, LEAST_SCALE
from ub_overlap.runtime.ops.fused_collective import FusedArgs

from . import rank_ops
from .oracle import data
from .rank_failures import attempt, fresh
from .rank_sessions import OPS, C, gather, reset, scatter

CASES = (
    ("all_reduce", "one_shot"),
    ("all_reduce", "two_shot"),
    ("reduce_scatter", "one_shot"),
    ("all_gather", "one_shot"),
)
NORMS = ("none", "rms", "layer")


def arguments(
    collective: str, strategy: str, rows: int, cols: int, rank: int, world: int, name: str, seed: int = 0, **options: Any
) -> FusedArgs:
    """Return the arguments of a call with `rows` rows of a rank's result.

    options: dtype, norm, round_sum, rounded, offset (of the weight), scale (a float8 format), by_row (rows have scales),
    divides, by, site; linear_bias, branch (its norm), factor, addend.
    """
    dtype, norm = options.get("dtype", torch.float32), options.get("norm", "none")
    own = rows * world if collective == "reduce_scatter" else rows
    residual = data(rows, cols, seed=seed + 50, dtype=dtype) if norm != "none" else None
    weight = data(cols, seed=seed + 51, dtype=dtype) if norm != "none" else None
    bias = data(cols, seed=seed + 52, dtype=dtype) if norm == "layer" else None
    format, by_row = options.get("scale"), bool(options.get("scale") and options.get("by_row"))
    scale = torch.tensor([0.125]) if format and not by_row else None
    branch_norm = options.get("branch", "none")
    vectors = [data(cols, seed=seed + s, dtype=dtype) for s in (53, 54, 55)]
    branch = (
        vectors[0] if options.get("linear_bias") else None, branch_norm, vectors[1] if branch_norm != "none" else None,
        vectors[2] if branch_norm == "layer" else None, 1e-3, bool(options.get("rounded")), options.get("offset", 0.0),
        options.get("factor", 1.0), data(rows, cols, seed=seed + 56, dtype=dtype) if options.get("addend") else None,
    )  # fmt: skip
    rows_scales = (1.0 / torch.finfo(format).max, LEAST_SCALE) if by_row else (0.0, 0.0)
    return FusedArgs(
        data(own, cols, seed=seed + rank, dtype=dtype), collective, options.get("by", "sum"), *branch, residual, norm, weight,
        bias, 1e-5, options.get("round_sum", True), bool(options.get("rounded")), options.get("offset", 0.0), scale,
        *rows_scales, bool(options.get("divides")), format or dtype, strategy, name, options.get("site", "/fused"),
    )  # fmt: skip


def expected(a: FusedArgs, rank: int, world: int, seed: int = 0) -> list[torch.Tensor]:
    """Compute the results from all ranks' inputs: sums in fp32 in rank order, rounded once, then the epilogue."""
    inputs = [data(*a.input.shape, seed=seed + r, dtype=a.input.dtype) for r in range(world)]
    if a.collective == "all_gather":
        return [torch.cat(inputs)]
    total = inputs[0].float()
    for each in inputs[1:]:
        total = total + each.float()
    if a.reduce_op == "avg":
        total = total / world
    if a.collective == "reduce_scatter":
        total = total.chunk(world)[rank]
    return [t for t in epilogue(total.to(a.input.dtype), a) if t.numel()]


def epilogue(reduced: torch.Tensor, a: FusedArgs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute what follows the reduction, in fp32 or the wider type of `reduced`, step by step as the executor does."""
    branch = reduced if a.linear_bias is None else reduced + a.linear_bias
    if a.branch_norm != "none":
        branch_norm = (a.branch_norm, a.branch_weight, a.branch_bias, a.branch_epsilon, a.branch_round_before_weight)
        branch = normed(branch, branch.dtype, *branch_norm, a.branch_weight_offset)
    branch = branch * a.branch_factor if a.branch_factor != 1 else branch
    branch = branch if a.addend is None else branch + a.addend.reshape(reduced.shape)
    summed = branch if a.residual is None else branch + a.residual.reshape(reduced.shape)
    none = summed.new_empty((0,))
    if a.norm == "none":
        return summed, none, none
    wide = torch.promote_types(summed.dtype, torch.float32)
    x = summed
    if a.residual is not None and not a.round_sum:
        x = branch.to(wide) + a.residual.reshape(reduced.shape).to(wide)
    x = normed(x, summed.dtype, a.norm, a.weight, a.bias, a.epsilon, a.round_before_weight, a.weight_offset)
    if a.scale is None and not a.amax_factor:
        return summed, x, none
    limit = torch.finfo(a.normed_dtype).max if a.normed_dtype in FLOAT8 else float("inf")
    scale = a.scale
    if scale is None:
        scale = (x.to(wide).abs().amax(-1, keepdim=True) * a.amax_factor).clamp_min(a.least_scale)
    scaled = x.to(wide) / scale if a.divide_by_scale else x.to(wide) * scale.reciprocal()
    return summed, scaled.clamp(-limit, limit).to(a.normed_dtype), none if a.scale is not None else scale


def normed(
    x: torch.Tensor,
    dtype: torch.dtype,
    kind: str,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    epsilon: float,
    round_before_weight: bool,
    offset: float,
) -> torch.Tensor:
    """Compute the norm of the rows of `x` in fp32 or wider, rounded to `dtype`."""
    wide = torch.promote_types(dtype, torch.float32)
    x = x.to(wide)
    if kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)
    if round_before_weight:
        x = x.to(dtype).to(wide)
    if weight is not None:
        x = x * (offset + weight.to(wide))
    if bias is not None:
        x = x + bias.to(wide)
    return x.to(dtype)


def call(a: FusedArgs) -> list[torch.Tensor]:
    return [t for t in OPS.fused_collective(*a) if t.numel()]


def equal(mine: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    same = [a.dtype == b.dtype and torch.equal(a.float(), b.float()) for a, b in zip(mine, want, strict=True)]
    return all(same)


def random_program(rank: int, world: int, times: int, delay_us: int, seed: int) -> list[str]:
    """Run fused collectives of random kinds and sizes, and other calls, under random delays. Compare bit by bit."""
    name, bad, order = fresh(world), [], random.Random(seed)
    with reset():
        C.testing.set_random_delay(delay_us, 7 * rank + seed)
        for step in range(times):
            what = order.randrange(8)
            (collective, strategy), norm = order.choice(CASES), order.choice(NORMS)
            dtype = order.choice((torch.float32, torch.bfloat16, torch.float16))
            rows, cols = order.randrange(1, 9), order.choice((8, 64, 2048 if order.random() < 0.1 else 16))
            options: dict[str, Any] = {"dtype": dtype, "norm": "none" if collective == "all_gather" else norm}
            options |= {"by": order.choice(("sum", "avg")), "rounded": order.random() < 0.5, "offset": order.choice((0.0, 1.0))}
            if collective != "all_gather":
                options |= {"linear_bias": order.random() < 0.3, "branch": order.choice(NORMS)}
                options |= {"factor": order.choice((1.0, 0.22)), "addend": order.random() < 0.3}
            if norm != "none" and collective != "all_gather":
                options["scale"] = order.choice((None, torch.float8_e4m3fn, torch.float8_e5m2))
                options |= {name: order.random() < 0.5 for name in ("round_sum", "by_row", "divides")}
            if what == 0:
                bad += gather(name, rank, world, 5, seed=step)
            elif what == 1:
                bad += scatter(name, rank, world, 4, seed=step)
            else:
                a = arguments(collective, strategy, rows, cols, rank, world, name, step, **options)
                if not equal(call(a), expected(a, rank, world, step)):
                    bad.append(f"step {step}: {collective} {strategy} {rows} x {cols} {options}")
    return bad[:5]


def close_to_float64(rank: int, world: int) -> list[str]:
    """The results are as close to float64 as rounding allows; "none" runs c10d and agrees; strategies agree bit by bit."""
    name, bad = rank_ops.group(), []
    for norm in NORMS:
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 3e-2)):
            one, two, plain = (
                call(arguments("all_reduce", s, 5, 64, rank, world, name, dtype=dtype, norm=norm, site=f"/{s}"))
                for s in ("one_shot", "two_shot", "none")
            )
            a = arguments("all_reduce", "none", 5, 64, rank, world, name, dtype=dtype, norm=norm)
            wide = a._replace(
                residual=None if a.residual is None else a.residual.double(),
                weight=None if a.weight is None else a.weight.double(),
                bias=None if a.bias is None else a.bias.double(),
            )
            total = sum(data(5, 64, seed=r, dtype=dtype).double() for r in range(world))
            exact = [t for t in epilogue(total, wide) if t.numel()]  # type: ignore[arg-type]
            bad += [f"{norm} {dtype}: strategies differ"] if not equal(one, two) else []
            for mine in (one, plain):
                far = [float((x.double() - y).abs().max()) for x, y in zip(mine, exact, strict=True)]
                bad += [f"{norm} {dtype}: {far}"] if max(far) > tolerance * float(exact[0].abs().max()) else []
    return bad


def casts_close_to_float64(rank: int, world: int, strategy: str) -> list[str]:
    """Rows that are cast, and multiplied by their scale again, are as close to float64 as e4m3 rounds."""
    name, bad = rank_ops.group(), []
    for round_sum, divides, norm in ((True, False, "rms"), (False, True, "rms"), (False, False, "layer")):
        options: dict[str, Any] = {"norm": norm, "scale": torch.float8_e4m3fn, "by_row": True, "site": f"/cast.{strategy}"}
        options |= {"dtype": torch.bfloat16, "round_sum": round_sum, "divides": divides}
        a = arguments("all_reduce", strategy, 5, 64, rank, world, name, **options)
        summed, q, scales = OPS.fused_collective(*a)
        total = sum(data(5, 64, seed=r, dtype=torch.bfloat16).double() for r in range(world))
        wide = a._replace(amax_factor=0.0, residual=a.residual.double(), weight=a.weight.double())  # type: ignore[union-attr]
        exact = epilogue(total, wide._replace(bias=None if a.bias is None else a.bias.double()))[1]  # type: ignore[arg-type]
        limit = exact.abs() * (2**-4 + 2**-5) + scales.double() * 2**-9 + 0.02 * exact.abs().amax() * 2**-4
        far = (q.double() * scales.double() - exact).abs() / limit
        bad += [f"{round_sum} {divides} {norm}: {float(far.max())}"] if not bool((far <= 1).all()) else []
        full = q.float().abs().amax(-1) == 448
        bad += [f"{norm}: a row does not use the whole range"] if not bool(full.all()) or summed.dtype != torch.bfloat16 else []
    return bad


def misuse(rank: int, world: int) -> list[dict[str, Any]]:
    """Errors of one rank's own program: all ranks get them, and the group stays usable."""
    name = fresh(world)

    def wrong(**fields: Any) -> dict[str, Any]:
        a = arguments("all_reduce", "one_shot", 4, 8, rank, world, name, norm="rms")
        return attempt(lambda: call(a._replace(**fields)))

    found = [
        wrong(strategy="bulk"),
        wrong(collective="reduce_scatter", strategy="two_shot"),
        wrong(norm="batch"),
        wrong(norm="none"),
        wrong(branch_norm="rms", branch_weight=data(7, seed=0)),
        wrong(branch_weight=data(8, seed=0)),
        wrong(linear_bias=data(8, seed=0).half()),
        wrong(linear_bias=data(8, 1, seed=0)),
        wrong(addend=data(8, seed=0)),
        wrong(norm="none", weight=None, normed_dtype=torch.float8_e4m3fn, scale=torch.tensor(1.0)),
        wrong(collective="all_gather"),
        wrong(collective="all_gather", norm="none", weight=None, residual=None, linear_bias=data(8, seed=0)),
        wrong(weight=data(7, seed=0)),
        wrong(residual=data(4, 8, seed=0).half()),
        wrong(input=data(4, 6, seed=0), residual=None, weight=None),
        wrong(input=data(1, 20000, seed=0), residual=None, weight=None),
        wrong(normed_dtype=torch.float16),
        wrong(normed_dtype=torch.float8_e4m3fn, scale=torch.tensor(1.0), amax_factor=1 / 448, least_scale=1e-9),
        wrong(normed_dtype=torch.float8_e4m3fn, amax_factor=1 / 448),
    ]
    a = arguments("all_reduce", "one_shot", 4, 8, rank, world, name, norm="rms")
    return [*found, {"error": "" if equal(call(a), expected(a, rank, world)) else "wrong"}]


def skipped(rank: int, world: int, strategy: str, step_s: float) -> dict[str, Any]:
    """The last rank skips a call, after one that it made."""
    name = fresh(world)
    with reset():
        settings.configure(step_timeout_s=step_s)
        a = arguments("all_reduce", strategy, 4, 8, rank, world, name)
        call(a)
        found = attempt(lambda: rank == world - 1 or call(a))
        dist.barrier()
        return found


def other_site(rank: int, world: int, strategy: str) -> dict[str, Any]:
    """Rank 1 is at another site."""
    name = fresh(world)
    with reset():
        settings.configure(step_timeout_s=30.0)
        call(arguments("all_reduce", strategy, 4, 8, rank, world, name))
        a = arguments("all_reduce", strategy, 4, 8, rank, world, name, site=f"/order.{rank}")
        found = attempt(lambda: call(a))
        dist.barrier()
        return found


def aborted(rank: int, world: int) -> dict[str, Any]:
    """Rank 0 waits in a fused collective behind a gather, and is aborted from another thread. Rank 1 calls the group later."""
    group = dist.new_group(list(range(world)))
    name = group.group_name
    with reset():
        settings.configure(step_timeout_s=60.0)
        gather(name, rank, world, 4)
        a = arguments("all_reduce", "one_shot", 4, 8, rank, world, name)
        call(a)
        dist.barrier()
        if rank == 0:
            thread = threading.Timer(0.5, ub_overlap.abort, (group,), {"reason": "the scheduler said so"})
            thread.start()
            found = attempt(lambda: call(a._replace(site="/waits")))
            thread.join()
        dist.barrier()
        if rank > 0:
            found = attempt(lambda: gather(name, rank, world, 4))
        return found


def dies(rank: int, world: int, step_s: float) -> dict[str, Any]:
    """Rank 1 ends before its second call."""
    name = fresh(world)
    settings.configure(step_timeout_s=step_s)
    a = arguments("all_reduce", "one_shot", 4, 8, rank, world, name)
    call(a)
    if rank == 1:
        os._exit(0)
    return attempt(lambda: call(a))


def fake_sizes(rank: int, world: int, collective: str) -> list[tuple[Any, ...]]:
    """Return shapes and dtypes of the fake and of the real results."""
    found = []
    a = arguments(collective, "one_shot", 4, 8, rank, world, rank_ops.group(), dtype=torch.bfloat16)
    if collective != "all_gather":
        a = a._replace(norm="rms", amax_factor=1 / 448, least_scale=LEAST_SCALE, normed_dtype=torch.float8_e4m3fn)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = a._replace(**{k: mode.from_tensor(v) for k, v in a._asdict().items() if isinstance(v, torch.Tensor)})
        found += [(tuple(t.shape), t.dtype, t.stride()) for t in OPS.fused_collective(*fakes)]
    real = [(tuple(t.shape), t.dtype, t.stride()) for t in OPS.fused_collective(*a)]
    return [x for x, y in zip(found, real, strict=True) if x != y]


def by_size(rank: int, world: int) -> list[str]:
    """A table of strategies picks one by the rows of a call. Return the strategies that ran."""
    name = fresh(world)
    table = "4=one_shot;*=two_shot"
    for rows in (2, 4, 5, 100):
        a = arguments("all_reduce", table, rows, 8, rank, world, name, site="/sized")
        assert equal(call(a), expected(a, rank, world))
    return sorted(ops.extension().site_stats()["/sized"]["strategies"])

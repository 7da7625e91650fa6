"""Rank functions of test_ops.py: every op over many cases. Each returns a list of errors."""

from __future__ import annotations

import itertools
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ub_overlap.runtime.ops  # noqa: F401  (registers the ops)

from . import oracle
from .oracle import data, far

OPS = torch.ops.ub_overlap
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def group() -> str:
    return dist.group.WORLD.group_name  # type: ignore[union-attr]


def strategies(world: int) -> list[str]:
    """Return strategies with fewer and more pieces than ranks, divisible or not. Proofs for 8 ranks are slow."""
    chunks = [1, max(1, world - 1), 2 * world, 3 * world - 1] if world < 4 else [world - 1, 2 * world - 1]
    return ["pipelined", *(f"pipelined:chunks={n}" for n in chunks)]


def striped(world: int) -> list[str]:
    """Return further arguments of reductions."""
    return [*strategies(world), "pipelined:stripes=1", f"pipelined:stripes={world + 1}", "direct"]


def independent(rank: int, dtype: torch.dtype, count: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return the operands of independent matmuls. Sizes and values are this rank's own."""
    lhs = [data(4 + rank + j, 6, seed=700 + rank + j, dtype=dtype) for j in range(count)]
    return lhs, [data(3, 6, seed=800 + rank + j, dtype=dtype).T for j in range(count)]


def far_products(name: str, lhs: list[Tensor], rhs: list[Tensor], outs: list[Tensor]) -> list[str]:
    """Return the errors of the products of independent matmuls."""
    bad: list[str] = []
    for a, b, out in zip(lhs, rhs, outs, strict=True):
        bad += far(f"{name} independent", out, a.double() @ b.double(), 6)
        bad += [f"{name} independent: dtype {out.dtype}"] if out.dtype != a.dtype else []
    return bad


def gather_case(
    rank: int,
    world: int,
    dtype: torch.dtype,
    outer: int,
    m: int,
    q: int,
    n: int,
    last: bool,
    keep: bool,
    strategy: str,
    transposes: list[oracle.Transposes],
    seed: int,
) -> list[str]:
    sizes = (m, q) if last else (outer * m, q)
    shards = [data(*sizes, seed=seed + r, dtype=dtype) for r in range(world)]
    whole = oracle.gathered([s.double() for s in shards], outer, last)
    operands = []
    for j, (transpose_gathered, _) in enumerate(transposes):
        rows = whole.shape[0] if transpose_gathered else whole.shape[1]
        b = data(n, rows, seed=seed + 100 + j, dtype=dtype).T if j % 2 else data(rows, n, seed=seed + 100 + j, dtype=dtype)
        operands.append(b)
    shard = shards[rank]
    others = independent(rank, dtype, seed // 10 % 3 if transposes else 0)
    if seed % 3 == 0:  # a view that is not contiguous
        shard = torch.empty(sizes[1], sizes[0], dtype=dtype).T.copy_(shard)
    got, outs = OPS.all_gather_matmul(
        shard,
        operands,
        [transpose_gathered for transpose_gathered, _ in transposes],
        [transpose_out for _, transpose_out in transposes],
        1 if last else outer,
        last,
        keep,
        *others,
        strategy,
        group(),
        f"/ag.{seed}",
    )
    name = f"gather {dtype} outer={outer} m={m} q={q} n={n} last={last} {strategy}"
    bad = []
    if keep:
        if not torch.equal(got, oracle.gathered(shards, outer, last)):
            bad.append(f"{name}: gathered differs")
    elif tuple(got.shape) != (0,):
        bad.append(f"{name}: gathered is {tuple(got.shape)}")
    bad += far_products(name, *others, outs[len(operands) :])
    for transpose, operand, out in zip(transposes, operands, outs, strict=False):
        want = oracle.product(whole, operand.double(), *transpose)
        bad += far(f"{name} {transpose}", out, want, operand.shape[0])
        if out.dtype != dtype:
            bad.append(f"{name}: dtype {out.dtype}")
    return bad


def gathers(rank: int, world: int) -> list[str]:
    bad: list[str] = []
    seed = 1000
    engine = ["pipelined:copies=engine", *([f"pipelined:chunks={2 * world - 1}:copies=engine"] if world < 4 else [])]
    for dtype, strategy, last in itertools.product(DTYPES, [*strategies(world), *engine], (False, True)):
        for outer, m, q, n in ((1, 12, 16, 8), (3, 5, 7, 9), (1, 1, 4, 3), (20, 2, 6, 5)):
            seed += 10
            keep = strategy != "pipelined"
            bad += gather_case(rank, world, dtype, outer, m, q, n, last, keep, strategy, oracle.ALL_TRANSPOSES, seed)
    for outer, m, q, n in ((1, 0, 4, 3), (1, 3, 0, 2), (0, 3, 4, 2), (1, 3, 4, 0), (2, 0, 0, 0)):
        for last in (False, True):
            if last and outer != 1:
                continue
            seed += 10
            bad += gather_case(rank, world, torch.float32, outer, m, q, n, last, True, "pipelined", oracle.ALL_TRANSPOSES, seed)
            bad += gather_case(
                rank, world, torch.bfloat16, outer, m, q, n, last, False, "pipelined", oracle.ALL_TRANSPOSES, seed + 5
            )
    bad += gather_case(rank, world, torch.float32, 1, 4, 5, 6, False, True, "pipelined", [], 9)
    return bad


def term(world: int, rank: int, t: int, p: int, k: int, q: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor]:
    a = data(p, k, seed=seed + 31 * rank + t, dtype=dtype)
    b = (
        data(q, k, seed=seed + 57 * rank + t + 5, dtype=dtype).T
        if t % 2 == 0
        else data(k, q, seed=seed + 57 * rank + t + 5, dtype=dtype)
    )
    return a, b


def reduce_case(
    rank: int, world: int, dtype: torch.dtype, out_dtype: torch.dtype, p: int, ks: list[int], q: int, outer: int, last: bool,
    reduce_op: str, keep: bool, addend_dims: int, strategy: str, seed: int, scatter: bool,
) -> list[str]:  # fmt: skip
    partials, mine = [], None
    for r in range(world):
        terms = [term(world, r, t, p, k, q, dtype, seed) for t, k in enumerate(ks)]
        addend = [None, data(q, seed=seed + r + 900, dtype=dtype), data(p, q, seed=seed + r + 900, dtype=dtype)][addend_dims]
        partial = sum((a.double() @ b.double() for a, b in terms), torch.zeros(p, q).double())
        partials.append(partial if addend is None else partial + addend.double())
        if r == rank:
            mine = (*map(list, zip(*terms, strict=True)), addend)
    assert mine is not None
    lhs, rhs, addend = mine
    others = independent(rank, dtype, seed // 1000 % 3)
    if scatter:
        want = oracle.scattered(partials, outer, last, rank)
        out, partial, products = OPS.matmul_reduce_scatter(
            lhs, rhs, addend, outer, last, reduce_op, out_dtype, keep, "plain", *others, strategy, group(), f"/rs.{seed}"
        )
    else:
        want = sum(partials)
        out, partial, products = OPS.matmul_all_reduce(
            lhs, rhs, addend, reduce_op, out_dtype, keep, *others, strategy, group(), f"/ar.{seed}"
        )
    if reduce_op == "avg":
        want = want / world
    coarse = max((dtype, out_dtype), key=lambda d: torch.finfo(d).eps)
    sizes = f"p={p} ks={ks} q={q} outer={outer} last={last}"
    name = f"{'scatter' if scatter else 'reduce'} {dtype}->{out_dtype} {sizes} {reduce_op} addend={addend_dims} {strategy}"
    bad = far(name, out, want, sum(ks) * world, coarse)
    if out.dtype != out_dtype:
        bad.append(f"{name}: dtype {out.dtype}")
    if keep:
        bad += far(f"{name} partial", partial, partials[rank], sum(ks), dtype)
    elif tuple(partial.shape) != (0,):
        bad.append(f"{name}: partial is {tuple(partial.shape)}")
    return bad + far_products(name, *others, products)


def scatters(rank: int, world: int) -> list[str]:
    bad: list[str] = []
    seed = 5000
    for dtype, strategy, last in itertools.product(DTYPES, striped(world), (False, True)):
        for outer, m, ks, q, op, addend, keep in (
            (1, 6, [16], 8, "sum", 0, False),
            (3, 2, [7, 3], 5, "avg", 1, True),
            (1, 1, [4, 5], 3, "sum", 2, False),
        ):
            seed += 1000
            o = 1 if last else outer
            p, cols = (m, q * world) if last else (outer * m * world, q)
            out_dtype = torch.float32 if seed % 2000 else dtype
            bad += reduce_case(rank, world, dtype, out_dtype, p, ks, cols, o, last, op, keep, addend, strategy, seed, True)
    for outer, p, k, q in ((1, 0, 4, 3), (1, 2 * world, 0, 3), (1, 2 * world, 3, 0), (0, 0, 3, 3), (20, 20 * world, 3, 4)):
        seed += 1000
        bad += reduce_case(
            rank, world, torch.float32, torch.bfloat16, p, [k], q, outer, False, "sum", True, 1, "pipelined", seed, True
        )
    return bad


def reduces(rank: int, world: int) -> list[str]:
    bad: list[str] = []
    seed = 2_000_000
    for dtype, strategy in itertools.product(DTYPES, striped(world)):
        for p, ks, q, op, addend, keep in (
            (4 * world, [16], 8, "sum", 0, False),
            (4 * world + 3, [7, 3], 5, "avg", 1, True),
            (1, [4], 3, "sum", 2, False),
            (0, [4], 3, "sum", 0, True),
        ):
            seed += 1000
            out_dtype = dtype if seed % 2000 else torch.float32
            bad += reduce_case(rank, world, dtype, out_dtype, p, ks, q, 1, False, op, keep, addend, strategy, seed, False)
    return bad


def directs(rank: int, world: int) -> list[str]:
    """Run products of one term by direct: blocks, addends, uneven and empty shards; and one rank that runs as pipelined."""
    bad: list[str] = []
    seed = 3_000_000
    for dtype, out_dtype in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)):
        for outer, m, k, q in ((1, 6, 16, 8), (3, 2, 7, 5), (20, 1, 3, 4), (1, 0, 4, 3), (1, 2, 0, 3), (0, 0, 3, 3)):
            for addend, op in ((0, "sum"), (1, "avg"), (2, "sum")):
                seed += 1000
                p = outer * m * world
                bad += reduce_case(
                    rank, world, dtype, out_dtype, p, [k], q, outer, False, op, False, addend, "direct", seed, True
                )
        for p, k, q in ((4 * world, 16, 8), (4 * world + 3, 7, 5), (1, 4, 3), (0, 4, 3)):
            for addend in (0, 1, 2):
                seed += 1000
                bad += reduce_case(
                    rank, world, dtype, out_dtype, p, [k], q, 1, False, "sum", False, addend, "direct", seed, False
                )
    for scatter in (True, False):  # rank 0 keeps the product, so it runs as pipelined: peers see no difference
        seed += 1000
        bad += reduce_case(
            rank, world, torch.float32, torch.float32, 3 * world, [5], 4, 1, False, "sum", rank == 0, 2, "direct", seed, scatter
        )
    return bad


def cut_directs(rank: int, world: int) -> list[str]:
    """Run direct calls whose matmul is cut into one per half of the shards. The checker accepts such schedules."""
    from ub_overlap.runtime import ops
    from ub_overlap.runtime.schedule import Key, Schedule, build_all, check
    from ub_overlap.runtime.schedule.encode import encode
    from ub_overlap.runtime.schedule.steps import Buf, Compute, Step

    def cut(schedule: Schedule) -> Schedule:
        steps: list[Step] = []
        for step in schedule.steps:
            if not isinstance(step, Compute) or step.writes[0].buf is not Buf.LANDING:
                steps.append(step)
                continue
            for lo, hi in ((Fraction(0), Fraction(1, 2)), (Fraction(1, 2), Fraction(1))):
                steps.append(replace(step, writes=tuple(replace(region, lo=lo, hi=hi) for region in step.writes)))
        return replace(schedule, steps=tuple(steps))

    def provide(key: tuple[Any, ...], me: int) -> list[tuple[int, ...]]:
        schedules = tuple(cut(schedule) for schedule in build_all(Key(*key)))
        check(schedules)
        return encode(schedules[me])

    bad: list[str] = []
    seed = 3_900_000
    ops.extension().set_provider(provide)
    try:
        for scatter, outer, m in ((True, 1, 6), (True, 3, 5), (True, 2, 1), (False, 1, 6), (False, 1, 5)):
            for addend in (0, 1, 2):
                seed += 1000
                p = outer * m * world + (0 if scatter else 3)
                float32 = torch.float32
                bad += reduce_case(
                    rank, world, float32, float32, p, [7], 5, outer, False, "sum", False, addend, "direct", seed, scatter
                )
    finally:
        ops.extension().set_provider(ops.ScheduleProvider())
    return bad


def bulk_case(
    rank: int, world: int, dtype: torch.dtype, collective: str, sizes: tuple[int, ...], count: int, op: str, chunks: str,
    other: torch.dtype, seed: int, out_dtype: torch.dtype | None = None,
) -> list[str]:  # fmt: skip
    full = (sizes[0] * world, *sizes[1:]) if collective == "reduce_scatter" else sizes
    inputs = [data(*full, seed=seed + r, dtype=dtype) for r in range(world)]
    lhs = [data(6, 5, seed=seed + 50 + j, dtype=other) for j in range(count)]
    rhs = [data(4, 5, seed=seed + 70 + j, dtype=other).T for j in range(count)]
    out_dtype = out_dtype or dtype
    out, outs = OPS.bulk(inputs[rank], lhs, rhs, collective, op, out_dtype, "bulk" + chunks, group(), f"/bulk.{seed}")
    total = sum(i.double() for i in inputs)
    if collective == "all_gather":
        want = torch.cat(inputs).double()
    else:
        want = total if collective == "all_reduce" else total[rank * sizes[0] : (rank + 1) * sizes[0]]  # type: ignore[index,misc]
        want = want / world if op == "avg" else want
    name = f"bulk {collective} {dtype}->{out_dtype} {sizes} {op} {chunks}"
    bad = far(name, out, want, world)
    for a, b, c in zip(lhs, rhs, outs, strict=True):
        bad += far(f"{name} product", c, a.double() @ b.double(), 5)
    return bad


def bulks(rank: int, world: int) -> list[str]:
    bad: list[str] = []
    seed = 4_000_000
    kinds = ("all_gather", "reduce_scatter", "all_reduce")
    for dtype, collective, chunks in itertools.product(DTYPES, kinds, ("", f":chunks={2 * world}")):
        for sizes, count, op in (
            ((5, 3), 2, "sum"),
            ((7,), 0, "avg"),
            ((2, 3, 4), 0, "sum"),
            ((0, 3), 2, "sum"),
            ((), 2, "sum"),
        ):
            if not sizes and collective != "all_reduce":
                continue
            seed += 1000
            bad += bulk_case(rank, world, dtype, collective, sizes, count, op, chunks, DTYPES[seed // 1000 % 3], seed)
    # The input travels in its type, and the sum is rounded once to another.
    for (dtype, out_dtype), collective in itertools.product(itertools.permutations(DTYPES, 2), kinds[1:]):
        for sizes, op, chunks in (((5, 3), "sum", ""), ((3, 2, 7), "avg", f":chunks={2 * world}"), ((0, 3), "sum", "")):
            seed += 1000
            bad += bulk_case(rank, world, dtype, collective, sizes, 1, op, chunks, dtype, seed, out_dtype)
    return bad


def everything(rank: int, world: int) -> dict[str, Any]:
    """Run all of the above. Proofs of pairs of schedules are omitted: they are quadratic in the number of cases."""
    from ub_overlap.runtime import ops
    from ub_overlap.runtime.schedule.encode import provide

    ops.extension().set_provider(provide)
    try:
        return {f.__name__: f(rank, world)[:20] for f in (gathers, scatters, reduces, directs, bulks)}
    finally:
        ops.extension().set_provider(ops.ScheduleProvider())

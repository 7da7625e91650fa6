"""Every op in many layouts, dtypes and strategies against float64 and NCCL + matmul; sub-groups, several groups and streams
at once, and changing sizes.

"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.gpu import cases
from tests.gpu.cases import (
    AG,
    AR,
    BF16,
    BOTH_T,
    BULK,
    E4M3,
    E5M2,
    F16,
    F32,
    GATHERED_T,
    OUT_T,
    PLAIN,
    RS,
    SAG,
    SRS,
    Case,
    Maker,
    Truth,
)  # fmt: skip
from tests.gpu.lockstep import Lockstep
from ub_overlap.runtime import ops
from ub_overlap.runtime.session import session

Layouts = dict[str, Callable[[Maker, torch.dtype], Case]]

LAYOUTS: dict[str, Layouts] = {
    AG: {
        "one consumer": lambda m, d: m.gather(d, 1, 128, 256, [PLAIN], False, False),
        "G and G^T keep, outer 2": lambda m, d: m.gather(d, 2, 64, 128, [PLAIN, GATHERED_T], False, True),
        "transposed outs": lambda m, d: m.gather(d, 1, 96, 128, [OUT_T, BOTH_T], False, False),
        "last, G and G^T keep": lambda m, d: m.gather(d, 1, 96, 64, [PLAIN, GATHERED_T], True, True),
        "odd sizes, all transposes": lambda m, d: m.gather(d, 3, 7, 13, [PLAIN, OUT_T, GATHERED_T, BOTH_T], False, True),
        "independent matmuls": lambda m, d: m.gather(d, 1, 128, 256, [PLAIN, GATHERED_T], False, False, independent=2),
        "last, odd": lambda m, d: m.gather(d, 1, 5, 7, [OUT_T, BOTH_T], True, True),
        "one row": lambda m, d: m.gather(d, 1, 1, 8, [PLAIN, GATHERED_T], False, True),
        "no rows": lambda m, d: m.gather(d, 1, 0, 8, [PLAIN, GATHERED_T], False, True),
    },
    RS: {
        "plain": lambda m, d: m.scatter(d, 1, 128, 256),
        "outer 2, bias, keep": lambda m, d: m.scatter(d, 2, 64, 128, bias=True, keep=True),
        "two terms, avg": lambda m, d: m.scatter(d, 1, 96, 128, depths=[64, 96], by="avg"),
        "independent matmuls, bias": lambda m, d: m.scatter(d, 1, 128, 256, bias=True, independent=2),
        "last": lambda m, d: m.scatter(d, 1, 96, 64, last=True),
        "odd sizes, out fp32": lambda m, d: m.scatter(d, 3, 7, 13, out_dtype=F32),
        "one row": lambda m, d: m.scatter(d, 1, 1, 8),
        "no rows": lambda m, d: m.scatter(d, 1, 0, 8),
    },
    AR: {
        "even, keep": lambda m, d: m.reduce(d, 256, 128, 64, keep=True),
        "independent matmul": lambda m, d: m.reduce(d, 256, 128, 64, independent=1),
        "odd rows, avg": lambda m, d: m.reduce(d, 131, 77, 64, "avg"),
        "one row": lambda m, d: m.reduce(d, 1, 8, 16),
    },
    SAG: {
        "tensor, two consumers": lambda m, d: m.scaled_gather(d, 1, 128, 256, False, widths=[96, 112]),
        "tensor, e5m2 shard, bias, keep": lambda m, d: m.scaled_gather(
            d, 2, 64, 128, False, types=(E5M2, E4M3), bias=True, keep=True
        ),
        "row, keep": lambda m, d: m.scaled_gather(d, 1, 96, 128, True, keep=True, widths=[96, 128]),
        "row, outer 2, e5m2 operand": lambda m, d: m.scaled_gather(d, 2, 32, 64, True, types=(E4M3, E5M2)),
        "row, odd rows, outer 3, bias, keep": lambda m, d: m.scaled_gather(d, 3, 7, 48, True, bias=True, keep=True),
        "one row": lambda m, d: m.scaled_gather(d, 1, 1, 16, True, keep=True),
        "no rows": lambda m, d: m.scaled_gather(d, 1, 0, 16, False, keep=True),
    },
    SRS: {
        "tensor": lambda m, d: m.scaled_scatter(d, 1, 128, 256, False),
        "row, outer 2, bias": lambda m, d: m.scaled_scatter(d, 2, 64, 128, True, bias=True),
        "two terms, avg, e5m2": lambda m, d: m.scaled_scatter(
            d, 1, 96, 128, False, depths=[64, 96], by="avg", types=(E5M2, E4M3)
        ),
        "row, odd rows, outer 3, out fp32": lambda m, d: m.scaled_scatter(d, 3, 7, 48, True, out_dtype=F32),
        "float8 wire": lambda m, d: m.scaled_scatter(d, 1, 96, 256, False, wire="float8"),
        "float8 wire, row, odd rows, outer 2, two terms": lambda m, d: m.scaled_scatter(
            d, 2, 13, 128, True, wire="float8", depths=[32, 48], out_dtype=F32
        ),
        "one row": lambda m, d: m.scaled_scatter(d, 1, 1, 16, True),
        "no rows": lambda m, d: m.scaled_scatter(d, 1, 0, 16, False),
    },
    BULK: {
        "all_gather": lambda m, d: m.bulk(d, "all_gather", 64, 128),
        "all_gather, odd": lambda m, d: m.bulk(d, "all_gather", 7, 13),
        "reduce_scatter, avg": lambda m, d: m.bulk(d, "reduce_scatter", 64 * m.ranks, 128, "avg"),
        "all_reduce, odd": lambda m, d: m.bulk(d, "all_reduce", 67, 31),
        "reduce_scatter, odd, out fp32": lambda m, d: m.bulk(d, "reduce_scatter", 7 * m.ranks, 13, out_dtype=F32),
        "all_reduce, odd, out fp32": lambda m, d: m.bulk(d, "all_reduce", 67, 31, out_dtype=F32),
    },
}


def strategies(op: str, ranks: int) -> list[str]:
    """Return strategies with one piece per rank, fewer, more, and a count that does not divide."""
    name = "bulk" if op == BULK else "pipelined"
    counts = sorted({1, 2, ranks, 2 * ranks, 2 * ranks + 1, max(1, ranks - 1)})
    stripes = [f"pipelined:stripes={n}" for n in sorted({1, 3, ranks})] if op in (RS, AR, SRS) else []
    direct = ["direct"] if op in (RS, AR) else []
    engine = [f"pipelined:{chunks}copies=engine" for chunks in ("", "chunks=1:", "chunks=3:")] if op in (AG, SAG) else []
    return [name, *(f"{name}:chunks={n}" for n in counts), *stripes, *direct, *engine]


def is_quick(op: str, dtype: torch.dtype, strategy: str, ranks: int) -> bool:
    """Does --quick run it?"""
    if dtype is not BF16:
        return dtype is F32 and op in (AG, RS) and strategy == "pipelined"
    return ":" not in strategy or strategy.endswith((f":chunks={2 * ranks + 1}", ":stripes=3", "pipelined:copies=engine"))


def all_layouts(lockstep: Lockstep, group: str, ranks: int, op: str, dtype: torch.dtype, strategy: str) -> str:
    """Run every layout of `op`. The world's collectives are the reference if the group spans the world."""
    make, worst, worst_plain = Maker(lockstep.device, ranks), 0.0, 0.0
    plain = group if ranks < lockstep.ranks else str(dist.group.WORLD.group_name)  # type: ignore[union-attr]
    for what, layout in LAYOUTS[op].items():
        case = layout(make, dtype)
        truth = Truth.of(case, plain)

        def ours(case: Case = case, truth: Truth = truth, what: str = what) -> tuple[float, float]:
            outs = cases.run_op(case, strategy, group, f"ops.{op}.{what}.{dtype}.{strategy}")
            lockstep.sync()
            session.check(group)
            return truth.check(outs, what)

        errors = lockstep.agree(ours) if ranks == lockstep.ranks else ours()  # ranks outside of a sub-group run something else
        worst, worst_plain = max(worst, errors[0]), max(worst_plain, errors[1])
    return f"{len(LAYOUTS[op])} layouts: error {worst:.2g}, plain {worst_plain:.2g}"


# ---- groups -----------------------------------------------------------------------------------------------------------------


def inside(lockstep: Lockstep, groups: list[list[int]], dtype: torch.dtype = BF16) -> str:
    """Run every op in this rank's group of `groups`; the groups run concurrently."""
    named = [(lockstep.new_group(ranks), ranks) for ranks in groups]  # all ranks make all groups
    note = "not in it"
    for name, ranks in named:
        if lockstep.rank not in ranks:
            continue
        for op in LAYOUTS:
            strategy = "bulk" if op == BULK else "pipelined"
            note = all_layouts(lockstep, name, len(ranks), op, dtype, strategy)
    lockstep.barrier()
    return note


def mesh(lockstep: Lockstep) -> str:
    """Alternate ops between both groups of a 2D mesh."""
    from torch.distributed.device_mesh import init_device_mesh

    grid = init_device_mesh(lockstep.device_type, (2, lockstep.ranks // 2), mesh_dim_names=("dp", "tp"))
    note = ""
    for op in (AG, RS, AR, BULK):
        for dim in ("tp", "dp"):
            group = grid.get_group(dim)
            strategy = "bulk" if op == BULK else "pipelined"
            note = all_layouts(lockstep, str(group.group_name), group.size(), op, BF16, strategy)
    return note


def worst_of(lockstep: Lockstep, done: list[tuple[Case, list[torch.Tensor]]]) -> float:
    """Return the largest error of all calls against float64, over all ranks."""
    world = str(dist.group.WORLD.group_name)  # type: ignore[union-attr]
    truths = [Truth.of(case, world) for case, _ in done]
    found = lockstep.agree(lambda: [t.check(o, f"call {i}")[0] for i, (t, (_, o)) in enumerate(zip(truths, done, strict=True))])
    return max(found)


def two_groups(lockstep: Lockstep, group: str, lanes: int) -> str:
    """Queue alternating calls of two groups on `lanes` streams, then compare all results with float64."""
    second = lockstep.new_group()
    make, calls = Maker(lockstep.device, lockstep.ranks), []
    queued: list[tuple[Case, list[torch.Tensor]]] = []
    streams: list[Any] = [torch.cuda.Stream() for _ in range(lanes)] if lockstep.cuda and lanes > 1 else [None]
    for i in range(24):
        calls.append(make.kind(("AG", "RS", "AR", "bulk")[i % 4]))
    lockstep.sync()
    for i, (case, strategy) in enumerate(calls):
        # With two streams each group has its own. They share the one copy queue of the device.
        which = (i // 4 + i) % 2
        with torch.cuda.stream(streams[which % len(streams)]):
            queued.append((case, cases.run_op(case, strategy, (group, second)[which], f"two.{case[0]}")))
    lockstep.sync()
    session.check()
    return f"{len(calls)} calls: error {worst_of(lockstep, queued):.2g}"


def two_streams(lockstep: Lockstep, group: str) -> str:
    """Queue calls of one group on two streams, chosen per rank at random: they are serialised."""
    if not lockstep.cuda:
        return "one stream on the CPU"
    make = Maker(lockstep.device, lockstep.ranks)
    calls = [make.kind(("AG", "RS", "AR", "bulk")[i % 4]) for i in range(24)]
    lanes, mine = [torch.cuda.Stream() for _ in range(2)], lockstep.own_random(5)
    lockstep.sync()
    queued = []
    for case, strategy in calls:
        with torch.cuda.stream(lanes[mine.randrange(2)]):
            lockstep.sleep_on_device(mine.random() * 0.002)
            queued.append((case, cases.run_op(case, strategy, group, f"streams.{case[0]}")))
    lockstep.sync()
    session.check(group)
    return f"{len(calls)} calls: error {worst_of(lockstep, queued):.2g}"


# ---- sizes ------------------------------------------------------------------------------------------------------------------


def sizes(lockstep: Lockstep, rows: list[int], grown: int) -> str:
    """Queue calls with these rows per rank on a new group.

    `grown`: maximum number of landing area growths, at least one if not 0.
    """
    group, make = lockstep.new_group(), Maker(lockstep.device, lockstep.ranks)
    growths, before = [0], session.Session.grow

    def counted(self: Any, *args: Any) -> None:
        growths[0] += 1
        before(self, *args)

    session.Session.grow = counted  # type: ignore[method-assign]
    try:
        calls = []
        for m in rows:
            for case in (make.gather(BF16, 1, m, 512, [PLAIN, GATHERED_T], False, True), make.scatter(BF16, 1, m, 512)):
                calls.append((case, cases.run_op(case, "pipelined", group, f"sizes.{case[0]}")))
    finally:
        session.Session.grow = before  # type: ignore[method-assign]
    lockstep.sync()
    session.check(group)
    worst = worst_of(lockstep, calls)
    if growths[0] > grown or (grown and not growths[0]):
        raise AssertionError(f"the landing area grew {growths[0]} times, expected {'1 to ' if grown else ''}{grown}")
    return f"{len(calls)} calls, grew {growths[0]} times: error {worst:.2g}"


def transport(lockstep: Lockstep, group: str) -> str:
    cases.run_op(Maker(lockstep.device, lockstep.ranks).kind("AG")[0], "pipelined", group, "transport")
    core = next(core for core in ops.extension().sessions() if core.group == group)
    wanted = "symmetric memory" if lockstep.cuda else "shared memory"
    if core.transport != wanted:
        raise AssertionError(f"transport {core.transport}: {core.reason}")
    return str(core.transport)


RANKS = int(os.environ.get("WORLD_SIZE", "2"))
CASES = [
    pytest.param(op, dtype, strategy, id=f"{op}-{str(dtype)[6:]}-{strategy}", marks=[] if quick else pytest.mark.full)
    for dtype in (BF16, F32, F16)
    for op in LAYOUTS
    for strategy in strategies(op, RANKS)
    for quick in [is_quick(op, dtype, strategy, RANKS)]
]


def test_transport(lockstep: Lockstep, group: str) -> None:
    lockstep.note(transport(lockstep, group))


@pytest.mark.parametrize(("op", "dtype", "strategy"), CASES)
def test_layouts(lockstep: Lockstep, group: str, op: str, dtype: torch.dtype, strategy: str) -> None:
    lockstep.note(all_layouts(lockstep, group, lockstep.ranks, op, dtype, strategy))


def test_smaller_and_larger_sizes_without_growth(lockstep: Lockstep) -> None:
    lockstep.note(sizes(lockstep, [1024, 64, 512, 1, 1024, 7], 0))


def test_growth_between_calls(lockstep: Lockstep) -> None:
    lockstep.note(sizes(lockstep, [16, 48, 4096, 16, 8192, 4096], 4))


@pytest.mark.parametrize("lanes", [1, 2])
def test_two_groups(lockstep: Lockstep, group: str, lanes: int) -> None:
    """`lanes`: streams that the calls are issued on."""
    lockstep.note(two_groups(lockstep, group, lanes))


def test_one_group_on_two_streams(lockstep: Lockstep, group: str) -> None:
    lockstep.note(two_streams(lockstep, group))


# The mesh comes first: torch names its groups after how many groups the process is in, which must be equal on all ranks.
@pytest.mark.deadline(90)
@pytest.mark.skipif(RANKS < 4 or RANKS % 2 == 1, reason="needs 4 ranks or more, an even number")
def test_both_dims_of_a_mesh(lockstep: Lockstep) -> None:
    lockstep.note(mesh(lockstep))


SUBGROUPS = [
    *([list(range(size))] for size in range(2, RANKS)),
    *([[[0, 2], [1, 3]]] if RANKS >= 4 else []),
    *([[[r for r in range(RANKS) if r % 2 == parity] for parity in (0, 1)]] if RANKS > 4 else []),
    *([[[0, RANKS - 1]]] if RANKS >= 3 else []),
]


@pytest.mark.deadline(90)
@pytest.mark.skipif(RANKS < 3, reason="needs 3 ranks or more")
@pytest.mark.parametrize("groups", SUBGROUPS or [[[0, 1]]], ids=str)
def test_subgroups(lockstep: Lockstep, groups: list[list[int]]) -> None:
    lockstep.note(inside(lockstep, groups))

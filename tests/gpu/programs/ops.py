"""Every op in many layouts, dtypes and strategies against float64 and against NCCL + matmul; sub-groups of all sizes; several
groups and streams at once; sizes that change from call to call.

    torchrun --nproc-per-node 4 tests/gpu/programs/ops.py [--quick] [--only TEXT] [--device cpu]
"""

# ruff: noqa: E402   the path comes first

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[3])  # the tree, not this folder

from tests.gpu.frame import Frame  # isort: skip  (sets the environment before torch is imported)

import torch
import torch.distributed as dist

from tests.gpu import cases
from tests.gpu.cases import AG, AR, BF16, BULK, E4M3, E5M2, F16, F32, RS, SAG, SRS, Case, Maker, Truth
from ub_overlap.runtime import ops
from ub_overlap.runtime.session import session

Layouts = dict[str, Callable[[Maker, torch.dtype], Case]]

LAYOUTS: dict[str, Layouts] = {
    AG: {
        "mode 0": lambda m, d: m.gather(d, 1, 128, 256, [0], False, False),
        "modes 0 2 keep, outer 2": lambda m, d: m.gather(d, 2, 64, 128, [0, 2], False, True),
        "modes 1 3": lambda m, d: m.gather(d, 1, 96, 128, [1, 3], False, False),
        "last, modes 0 2 keep": lambda m, d: m.gather(d, 1, 96, 64, [0, 2], True, True),
        "odd sizes, all modes": lambda m, d: m.gather(d, 3, 7, 13, [0, 1, 2, 3], False, True),
        "last, odd": lambda m, d: m.gather(d, 1, 5, 7, [1, 3], True, True),
        "one row": lambda m, d: m.gather(d, 1, 1, 8, [0, 2], False, True),
        "no rows": lambda m, d: m.gather(d, 1, 0, 8, [0, 2], False, True),
    },
    RS: {
        "plain": lambda m, d: m.scatter(d, 1, 128, 256),
        "outer 2, bias, keep": lambda m, d: m.scatter(d, 2, 64, 128, bias=True, keep=True),
        "two terms, avg": lambda m, d: m.scatter(d, 1, 96, 128, depths=[64, 96], by="avg"),
        "last": lambda m, d: m.scatter(d, 1, 96, 64, last=True),
        "odd sizes, out fp32": lambda m, d: m.scatter(d, 3, 7, 13, out_dtype=F32),
        "one row": lambda m, d: m.scatter(d, 1, 1, 8),
        "no rows": lambda m, d: m.scatter(d, 1, 0, 8),
    },
    AR: {
        "even, keep": lambda m, d: m.reduce(d, 256, 128, 64, keep=True),
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
    },
}


def strategies(op: str, ranks: int, quick: bool) -> list[str]:
    """One piece a rank, fewer, as many, more, and a number that does not divide."""
    name = "bulk" if op == BULK else "pipelined"
    counts = [2 * ranks + 1] if quick else sorted({1, 2, ranks, 2 * ranks, 2 * ranks + 1, max(1, ranks - 1)})
    stripes = [f"pipelined:stripes={n}" for n in ((3,) if quick else (1, 3, ranks))] if op in (RS, AR, SRS) else []
    return [name, *(f"{name}:chunks={n}" for n in counts), *stripes]


def all_layouts(frame: Frame, group: str, ranks: int, op: str, dtype: torch.dtype, strategy: str) -> str:
    """One row: every layout of `op`; the world's own collectives are the plain op where the group is the world's."""
    make, worst, worst_plain = Maker(frame.device, ranks), 0.0, 0.0
    plain = group if ranks < frame.ranks else str(dist.group.WORLD.group_name)  # type: ignore[union-attr]
    for what, layout in LAYOUTS[op].items():
        case = layout(make, dtype)
        truth = Truth.of(case, plain)

        def ours(case: Case = case, truth: Truth = truth, what: str = what) -> tuple[float, float]:
            outs = cases.run_op(case, strategy, group, f"ops.{op}.{what}.{dtype}.{strategy}")
            frame.sync()
            session.check(group)
            return truth.check(outs, what)

        errors = frame.together(ours) if ranks == frame.ranks else ours()  # the others of a sub-group are elsewhere
        worst, worst_plain = max(worst, errors[0]), max(worst_plain, errors[1])
    return f"{len(LAYOUTS[op])} layouts: error {worst:.2g}, plain {worst_plain:.2g}"


def correctness(frame: Frame) -> None:
    for dtype in (BF16,) if frame.options.quick else (F32, BF16, F16):
        for op in LAYOUTS:
            for strategy in strategies(op, frame.ranks, frame.options.quick):
                name = f"{op} {str(dtype)[6:]} {strategy}"
                frame.row(name, lambda g, o=op, d=dtype, s=strategy: all_layouts(frame, g, frame.ranks, o, d, s))
    if frame.options.quick:
        for op in (AG, RS):
            frame.row(f"{op} float32", lambda g, o=op: all_layouts(frame, g, frame.ranks, o, F32, "pipelined"))


# ---- groups -----------------------------------------------------------------------------------------------------------------


def inside(frame: Frame, groups: list[list[int]], dtype: torch.dtype = BF16) -> str:
    """Every op in the one of `groups` that this rank is in; the groups work side by side."""
    named = [(frame.fresh(ranks), ranks) for ranks in groups]  # all ranks make all groups
    note = "not in it"
    for name, ranks in named:
        if frame.rank not in ranks:
            continue
        for op in LAYOUTS:
            strategy = "bulk" if op == BULK else "pipelined"
            note = all_layouts(frame, name, len(ranks), op, dtype, strategy)
    frame.barrier()
    return note


def subgroups(frame: Frame) -> None:
    world = frame.ranks
    if world >= 4 and world % 2 == 0:
        # First: torch names a mesh's groups after how many groups the process is in, which must be alike on all ranks.
        frame.row("2D mesh, both dims", lambda _: mesh(frame), 90)
    for size in range(2, world):
        frame.row(f"group of {size}: ranks 0..{size - 1}", lambda _, s=size: inside(frame, [list(range(s))]), 90)
    if world >= 4:
        frame.row("groups [0, 2] and [1, 3]", lambda _: inside(frame, [[0, 2], [1, 3]]), 90)
        halves = [[r for r in range(world) if r % 2 == i] for i in (0, 1)]
        frame.row(f"groups {halves[0]} and {halves[1]}", lambda _: inside(frame, halves), 90)
    if world >= 3:
        frame.row("group of the last and the first", lambda _: inside(frame, [[0, world - 1]]), 90)


def mesh(frame: Frame) -> str:
    """Ops on the two groups of a 2D mesh that this rank is in, in turns."""
    from torch.distributed.device_mesh import init_device_mesh

    grid = init_device_mesh(frame.kind, (2, frame.ranks // 2), mesh_dim_names=("dp", "tp"))
    note = ""
    for op in (AG, RS, AR, BULK):
        for dim in ("tp", "dp"):
            group = grid.get_group(dim)
            strategy = "bulk" if op == BULK else "pipelined"
            note = all_layouts(frame, str(group.group_name), group.size(), op, BF16, strategy)
    return note


def worst_of(frame: Frame, done: list[tuple[Case, list[torch.Tensor]]]) -> float:
    """The largest error of calls of all ranks, each against float64."""
    world = str(dist.group.WORLD.group_name)  # type: ignore[union-attr]
    truths = [Truth.of(case, world) for case, _ in done]
    found = frame.together(lambda: [t.check(o, f"call {i}")[0] for i, (t, (_, o)) in enumerate(zip(truths, done, strict=True))])
    return max(found)


def two_groups(frame: Frame, group: str, lanes: int) -> str:
    """Calls of two groups in turns, queued without waiting, on `lanes` streams; then all results against float64."""
    second = frame.fresh()
    make, calls = Maker(frame.device, frame.ranks), []
    queued: list[tuple[Case, list[torch.Tensor]]] = []
    streams: list[Any] = [torch.cuda.Stream() for _ in range(lanes)] if frame.cuda and lanes > 1 else [None]
    for i in range(24):
        calls.append(make.kind(("AG", "RS", "AR", "bulk")[i % 4]))
    frame.sync()
    for i, (case, strategy) in enumerate(calls):
        # With two streams a group keeps to its own: what meets is the device's one copy queue.
        which = (i // 4 + i) % 2
        with torch.cuda.stream(streams[which % len(streams)]):
            queued.append((case, cases.run_op(case, strategy, (group, second)[which], f"two.{case[0]}")))
    frame.sync()
    session.check()
    return f"{len(calls)} calls: error {worst_of(frame, queued):.2g}"


def two_streams(frame: Frame, group: str) -> str:
    """Calls of one group on two streams in turns: ordered, so right. On which stream a call runs differs between ranks."""
    if not frame.cuda:
        return "one stream on the CPU"
    make = Maker(frame.device, frame.ranks)
    calls = [make.kind(("AG", "RS", "AR", "bulk")[i % 4]) for i in range(24)]
    lanes, mine = [torch.cuda.Stream() for _ in range(2)], frame.own_random(5)
    frame.sync()
    queued = []
    for case, strategy in calls:
        with torch.cuda.stream(lanes[mine.randrange(2)]):
            frame.device_sleep(mine.random() * 0.002)
            queued.append((case, cases.run_op(case, strategy, group, f"streams.{case[0]}")))
    frame.sync()
    session.check(group)
    return f"{len(calls)} calls: error {worst_of(frame, queued):.2g}"


# ---- sizes ------------------------------------------------------------------------------------------------------------------


def sizes(frame: Frame, rows: list[int], grown: int) -> str:
    """Calls with so many rows a rank, back to back, on a new group. `grown`: how often its landing area may grow at most; it
    must where any call needs more than the first."""
    group, make = frame.fresh(), Maker(frame.device, frame.ranks)
    growths, before = [0], session.Session.grow

    def counted(self: Any, *args: Any) -> None:
        growths[0] += 1
        before(self, *args)

    session.Session.grow = counted  # type: ignore[method-assign]
    try:
        calls = []
        for m in rows:
            for case in (make.gather(BF16, 1, m, 512, [0, 2], False, True), make.scatter(BF16, 1, m, 512)):
                calls.append((case, cases.run_op(case, "pipelined", group, f"sizes.{case[0]}")))
    finally:
        session.Session.grow = before  # type: ignore[method-assign]
    frame.sync()
    session.check(group)
    worst = worst_of(frame, calls)
    if growths[0] > grown or (grown and not growths[0]):
        raise AssertionError(f"the landing area grew {growths[0]} times, expected {'1 to ' if grown else ''}{grown}")
    return f"{len(calls)} calls, grew {growths[0]} times: error {worst:.2g}"


def transport(frame: Frame, group: str) -> str:
    cases.run_op(Maker(frame.device, frame.ranks).kind("AG")[0], "pipelined", group, "transport")
    core = next(core for core in ops.extension().sessions() if core.group == group)
    wanted = "symmetric memory" if frame.cuda else "shared memory"
    if core.transport != wanted:
        raise AssertionError(f"transport {core.transport}: {core.reason}")
    return str(core.transport)


def main() -> int:
    with Frame("ops") as frame:
        frame.row("transport", lambda group: transport(frame, group), 90)
        correctness(frame)
        frame.row("sizes: smaller and larger, no growth", lambda _: sizes(frame, [1024, 64, 512, 1, 1024, 7], 0))
        frame.row("sizes: growth in the middle", lambda _: sizes(frame, [16, 48, 4096, 16, 8192, 4096], 4))
        frame.row("two groups at once", lambda group: two_groups(frame, group, 1))
        frame.row("two groups on two streams", lambda group: two_groups(frame, group, 2))
        frame.row("one group on two streams", lambda group: two_streams(frame, group))
        subgroups(frame)
    return frame.code


if __name__ == "__main__":
    sys.exit(main())

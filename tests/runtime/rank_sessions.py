"""Rank functions of test_sessions.py and test_overlap.py."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from tests.harness.shared_memory import list_segments
from ub_overlap.runtime import ops, settings
from ub_overlap.runtime.session import session

from . import rank_ops
from .oracle import data, far

OPS = torch.ops.ub_overlap
C = ops.extension()


@contextlib.contextmanager
def reset() -> Iterator[None]:
    """Restore hooks and settings of a pool's process on exit."""
    before = settings.current()
    try:
        yield
    finally:
        C.testing.reset()
        settings.configure(
            init_timeout_s=before.init_timeout_s, step_timeout_s=before.step_timeout_s, trace=before.trace, hosts=before.hosts
        )


def gather(
    name: str, rank: int, world: int, rows: int, seed: int = 0, cols: int = 4, site: str = "/g", strategy: str = "pipelined"
) -> list[str]:
    """Run one gather on a group and check it."""
    shards = [data(rows, cols, seed=seed + r) for r in range(world)]
    operand = data(cols, 3, seed=seed + 99)
    _, (out,) = OPS.all_gather_matmul(shards[rank], [operand], [False], [False], 1, False, False, [], [], strategy, name, site)
    return far("gather", out, torch.cat(shards).double() @ operand.double(), cols)


def scatter(
    name: str, rank: int, world: int, rows: int, seed: int = 0, site: str = "/s", strategy: str = "pipelined"
) -> list[str]:
    lhs = [data(rows * world, 5, seed=seed + r) for r in range(world)]
    operand = data(5, 3, seed=seed + 98)
    out, _, _ = OPS.matmul_reduce_scatter(
        [lhs[rank]], [operand], None, 1, False, "sum", torch.float32, False, "plain", [], [], strategy, name, site
    )
    total = sum(a.double() @ operand.double() for a in lhs)
    return far("scatter", out, total[rank * rows : (rank + 1) * rows], 5 * world)


def bitwise(rank: int, world: int) -> list[str]:
    """Gathers equal the same matmuls per chunk bitwise. Scatters are bitwise equal over runs and chunk counts."""
    bad, name = [], rank_ops.group()
    for dtype in rank_ops.DTYPES:
        shards = [data(24, 32, seed=r, dtype=dtype) for r in range(world)]
        operand = data(16, 32, seed=77, dtype=dtype).T
        for pieces in (1, 3):
            strategy = f"pipelined:chunks={world * pieces}"
            _, (out, flipped) = OPS.all_gather_matmul(
                shards[rank],
                [operand, operand],
                [False, False],
                [False, True],
                1,
                False,
                False,
                [],
                [],
                strategy,
                name,
                "/bits",
            )
            for r in range(world):
                for piece in [shards[r]] if r == rank else shards[r].chunk(pieces):
                    at = r * 24 + (piece.data_ptr() - shards[r].data_ptr()) // (32 * piece.element_size())
                    want = torch.mm(piece, operand)
                    if not torch.equal(out[at : at + len(piece)], want):
                        bad.append(f"gather {dtype} {pieces} pieces: shard {r} differs from mm")
                    if not torch.equal(flipped[:, at : at + len(piece)], want.T) and dtype is torch.float32:
                        bad += far("transposed", flipped[:, at : at + len(piece)].contiguous(), want.T.double(), 32)
        lhs, rhs = data(12 * world, 40, seed=5 + rank, dtype=dtype), data(40, 8, seed=6 + rank, dtype=dtype)
        runs = [
            OPS.matmul_reduce_scatter(
                [lhs], [rhs], None, 1, False, "sum", dtype, False, "plain", [], [], "pipelined", name, "/bits"
            )[0]
            for _ in range(5)
        ]
        if not all(torch.equal(runs[0], other) for other in runs[1:]):
            bad.append(f"scatter {dtype}: runs differ")
        direct, _, _ = OPS.matmul_reduce_scatter(
            [lhs], [rhs], None, 1, False, "sum", dtype, False, "plain", [], [], "direct", name, "/bits"
        )
        if not torch.equal(runs[0], direct):
            bad.append(f"scatter {dtype}: direct differs from pipelined")
        whole = OPS.matmul_all_reduce([lhs], [rhs], None, "sum", dtype, False, [], [], "pipelined", name, "/bits")[0]
        everyone = [torch.empty_like(whole) for _ in range(world)]
        dist.all_gather(everyone, whole)
        if not all(torch.equal(whole, other) for other in everyone):
            bad.append(f"all_reduce {dtype}: ranks differ")
    return bad


def accuracy(rank: int, world: int) -> list[str]:
    """Our scatter's error against fp64 is no larger than gloo's after the same matmul."""
    bad = []
    for dtype in rank_ops.DTYPES:
        lhs = [data(64 * world, 128, seed=5 + r, dtype=dtype) for r in range(world)]
        rhs = [data(128, 32, seed=60 + r, dtype=dtype) for r in range(world)]
        want = sum(a.double() @ b.double() for a, b in zip(lhs, rhs, strict=True))[rank * 64 : (rank + 1) * 64]
        ours, _, _ = OPS.matmul_reduce_scatter(
            [lhs[rank]],
            [rhs[rank]],
            None,
            1,
            False,
            "sum",
            dtype,
            False,
            "plain",
            [],
            [],
            "pipelined",
            rank_ops.group(),
            "/accuracy",
        )
        theirs = torch.empty(64, 32, dtype=dtype)
        dist.reduce_scatter_tensor(theirs, lhs[rank] @ rhs[rank])
        ours_off, theirs_off = ((x.double() - want).square().mean().sqrt().item() for x in (ours, theirs))
        if ours_off > theirs_off * 1.05:
            bad.append(f"{dtype}: rms error {ours_off:.4g}, gloo {theirs_off:.4g}")
    return bad


def every_fp16(rank: int, world: int) -> list[str]:
    """The reduction of each of the 65536 bit patterns with zeros from the peers returns the pattern unchanged."""
    bad = []
    for dtype in (torch.float16, torch.bfloat16):
        bits = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
        mine = bits if rank == 0 else torch.full_like(bits, -0.0)
        out, _ = OPS.bulk(mine, [], [], "all_reduce", "sum", dtype, "bulk", rank_ops.group(), "/bits16")
        same = (out.view(torch.int16) == bits.view(torch.int16)) | (out.isnan() & bits.isnan())
        if not bool(same.all()):
            bad.append(f"{dtype}: {int((~same).sum())} values change, first {bits[~same][0]} -> {out[~same][0]}")
        numbers = data(50_000, seed=3).mul(torch.logspace(-9, 5, 50_000))
        product = torch.ones(50_000, 1, dtype=torch.float32) * (numbers[:, None] if rank == 0 else -0.0)
        rounded, _, _ = OPS.matmul_all_reduce(
            [product], [torch.ones(1, 1)], None, "sum", dtype, False, [], [], "pipelined", rank_ops.group(), "/round"
        )
        if not torch.equal(rounded[:, 0], numbers.to(dtype)):
            off = rounded[:, 0] != numbers.to(dtype)
            bad.append(f"{dtype}: rounding differs for {numbers[off][:3].tolist()}: {rounded[:, 0][off][:3].tolist()}")
    return bad


def direct_steps(rank: int, world: int) -> dict[str, Any]:
    """Return errors, statistics and step times of a direct scatter and a direct all_reduce."""
    name = rank_ops.group()
    with reset():
        settings.configure(step_timeout_s=15.0, trace=True)
        C.clear_stats()
        bad = scatter(name, rank, world, 40, site="/direct.rs", strategy="direct")
        x, w = data(40 * world, 5, seed=rank), data(5, 3, seed=98)
        out, _, _ = OPS.matmul_all_reduce([x], [w], None, "sum", torch.float32, False, [], [], "direct", name, "/direct.ar")
        bad += far("reduce", out, sum(data(40 * world, 5, seed=r).double() for r in range(world)) @ w.double(), 5 * world)
        return {
            "bad": bad, "stats": C.site_stats(), "scatter": C.last_trace("/direct.rs"), "reduce": C.last_trace("/direct.ar"),
        }  # fmt: skip


def latched(rank: int, world: int) -> dict[str, Any]:
    """Copies run concurrently with matmuls. Each matmul waits for a copy of its call, so serial execution would time out."""
    name = rank_ops.group()
    with reset():
        settings.configure(step_timeout_s=15.0, trace=True)
        C.clear_stats()
        C.testing.set_latches([(0, 0)])
        bad = gather(name, rank, world, 4000, cols=64, site="/latched.ag")
        C.testing.set_latches([(1, 0)])
        bad += scatter(name, rank, world, 4000, site="/latched.rs")
        stats = C.site_stats()
        return {"bad": bad, "stats": stats, "trace": C.last_trace("/latched.ag"), "scatter": C.last_trace("/latched.rs")}


def shapes(rank: int, world: int) -> dict[str, Any]:
    """Arena growth and new shapes do not call the schedule provider again."""
    name, bad, lines = dist.new_group(list(range(world))).group_name, [], []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("ub_overlap.runtime.session")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    bad += gather(name, rank, world, 4) + scatter(name, rank, world, 4)
    asked = C.testing.provider_calls()
    for i, rows in enumerate((1, 2, 3, 5, 0, 7, 100, 3000, 1, 90_000, 2, 120_000, 6)):
        bad += gather(name, rank, world, rows, seed=i) + scatter(name, rank, world, rows, seed=i)
    log.removeHandler(handler)
    return {"bad": bad, "asked": C.testing.provider_calls() - asked, "grown": [line for line in lines if "grew" in line]}


def groups(rank: int, world: int) -> list[str]:
    """Overlapping groups work in one program. One is not contiguous and orders its ranks differently from the world."""
    lists = ([0, 2], [1, 3], [3, 0], [0, 1, 3])
    made = [
        dist.new_group(ranks, sort_ranks=False)
        if "sort_ranks" in dist.new_group.__code__.co_varnames
        else dist.new_group(ranks)
        for ranks in lists
    ]
    bad = []
    for turn in range(6):
        for ranks, group in zip(lists, made, strict=True):
            if rank not in ranks:
                continue
            me = dist.get_rank(group)
            bad += gather(group.group_name, me, len(ranks), 3 + turn, seed=turn)
            bad += scatter(group.group_name, me, len(ranks), 2 + turn, seed=turn)
        bad += gather(rank_ops.group(), rank, world, 4, seed=turn)
    return bad


def again(rank: int, world: int, port: int) -> dict[str, Any]:
    """A world that is destroyed and created again under the same name gets a new session and correct results."""
    name, bad, before = rank_ops.group(), [], C.generation()
    for life in range(2):
        bad += gather(rank_ops.group(), rank, world, 5, seed=life) + scatter(rank_ops.group(), rank, world, 5, seed=life)
        if life == 0:
            store = dist.distributed_c10d._get_default_store()
            dist.destroy_process_group()
            dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=world)
    return {"bad": bad, "same": name == rank_ops.group(), "sessions": C.generation() - before}


def alone(rank: int, world: int) -> list[str]:
    """Ops on a group of one rank are correct."""
    mine = [dist.new_group([r]) for r in range(world)][rank].group_name
    bad = gather(mine, 0, 1, 5) + scatter(mine, 0, 1, 5) + gather(mine, 0, 1, 6, strategy="pipelined:chunks=3")
    bad += gather(mine, 0, 1, 70, strategy="pipelined:chunks=64")  # the maximum that options allow
    out, _, _ = OPS.matmul_all_reduce(
        [torch.eye(3)], [torch.eye(3)], None, "avg", torch.float32, False, [], [], "pipelined", mine, "/one"
    )
    whole, _ = OPS.bulk(torch.ones(4), [], [], "all_reduce", "sum", torch.float32, "bulk", mine, "/one")
    return bad + ([] if torch.equal(out, torch.eye(3)) and torch.equal(whole, torch.ones(4)) else ["values differ"])


def hosts(rank: int, world: int) -> dict[str, Any]:
    """All ops run as plain c10d on a group whose ranks report two hosts. The statistics report it."""
    group = dist.new_group(list(range(world)))
    with reset():
        C.testing.set_host_id(f"host{rank % 2}:boot:1")
        original = rank_ops.group
        rank_ops.group = lambda: group.group_name
        try:
            bad = {
                f.__name__: f(rank, world)[:5] for f in (rank_ops.gathers, rank_ops.scatters, rank_ops.reduces, rank_ops.bulks)
            }
        finally:
            rank_ops.group = original
        gather(group.group_name, rank, world, 4, site="/hosts")
        return {"bad": bad, "stats": C.site_stats()["/hosts"]}


def closed(rank: int, world: int) -> dict[str, Any]:
    """Calls after a double close() start a new session."""
    name = dist.new_group(list(range(world))).group_name
    bad = gather(name, rank, world, 4)
    dist.barrier()
    session.close(name)
    session.close(name)
    return {
        "bad": bad + gather(name, rank, world, 4),
        "left": sorted(list_segments()),
    }


def checked(rank: int, world: int) -> list[str]:
    """All ops pass torch.library.opcheck, without the tests that only concern autograd."""
    name, tests = rank_ops.group(), ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    a, b = data(6, 4, seed=rank), data(4, 5, seed=rank + 9)
    for last, keep in ((False, True), (True, False)):
        operands = [data(4 * world if last else 4, 3, seed=1), data(6 if last else 6 * world, 3, seed=2)]
        torch.library.opcheck(
            OPS.all_gather_matmul.default,
            (a, operands, [False, True], [False, True], 1, last, keep, [a], [b], "pipelined", name, "/c"),
            test_utils=tests,
        )
        p, q = (6, 4 * world) if last else (6 * world, 4)
        args = (
            [data(p, 2, seed=3)],
            [data(2, q, seed=4)],
            data(q, seed=5),
            1,
            last,
            "avg",
            torch.bfloat16,
            keep,
            "plain",
            [a],
            [b],
            "pipelined",
            name,
            "/c",
        )
        torch.library.opcheck(OPS.matmul_reduce_scatter.default, args, test_utils=tests)
    torch.library.opcheck(
        OPS.matmul_all_reduce.default,
        ([a], [b], None, "sum", torch.float32, True, [a], [b], "pipelined", name, "/c"),
        test_utils=tests,
    )
    for collective in ("all_gather", "reduce_scatter", "all_reduce"):
        inputs = data(2 * world, 3, seed=rank)
        args = (inputs, [a], [b], collective, "sum", inputs.dtype, "bulk", name, "/c")
        torch.library.opcheck(OPS.bulk.default, args, test_utils=tests)
    return []


def autocast(rank: int, world: int) -> list[str]:
    """Autocast does not change an op's dtypes, on our transport and on plain c10d."""
    bad = []
    a, b = data(8, 16, seed=1), data(16, 4, seed=2)
    for host in ("", f"host{rank}:boot:1"):
        with reset(), torch.autocast("cpu"):
            C.testing.set_host_id(host)
            name = dist.new_group(list(range(world))).group_name
            out, partial, _ = OPS.matmul_all_reduce(
                [a], [b], None, "sum", a.dtype, True, [], [], "pipelined", name, "/autocast"
            )
            _, (product,) = OPS.all_gather_matmul(
                a, [b], [False], [False], 1, False, False, [], [], "pipelined", name, "/autocast"
            )
        want = a.double() @ b.double()
        bad += far("all_reduce", out, world * want, 16) + far("partial", partial, want, 16)
        bad += far("gather", product, torch.cat([want] * world), 16)
        bad += [f"{t.dtype}" for t in (out, partial, product) if t.dtype is not torch.float32]
    return bad


def threads(rank: int, world: int) -> list[str]:
    """Two threads with one group each start in opposite orders on two ranks. Neither waits for the other."""
    names = [dist.new_group(list(range(world))).group_name for _ in range(2)]
    bad: list[str] = []

    def reduce(which: int, seed: int) -> None:
        inputs = [data(50, 4, seed=seed + r) for r in range(world)]
        mine = inputs[rank]
        out, _ = OPS.bulk(mine, [], [], "all_reduce", "sum", mine.dtype, "bulk", names[which], f"/threads.{which}")
        bad.extend(far("all_reduce", out, sum(x.double() for x in inputs), world))

    def work(which: int) -> None:
        try:
            for turn in range(3):
                reduce(which, 10 * turn)
                time.sleep(0.3 if which == (rank + turn) % 2 else 0.0)
        except Exception as error:  # noqa: BLE001  (reported to the test)
            bad.append(f"{type(error).__name__}: {error}")

    with reset():
        settings.configure(step_timeout_s=30.0)
        reduce(0, 1)
        reduce(1, 2)
        C.testing.set_step_delays({3: 200_000})  # both first pushes are in flight before either is reduced
        both = [threading.Thread(target=work, args=(which,)) for which in ((0, 1) if rank else (1, 0))]
        for thread in both:
            thread.start()
            time.sleep(0.1)
        for thread in both:
            thread.join()
    return bad


def gone(rank: int, world: int) -> list[str]:
    """The session and memory of a destroyed group are freed at the latest when the next session is created."""
    first = dist.new_group(list(range(world)))
    name, bad = first.group_name, gather(first.group_name, rank, world, 4)
    dist.destroy_process_group(first)
    del first
    bad += gather(dist.new_group(list(range(world))).group_name, rank, world, 4)
    return bad + [f"{s.group} is still there" for s in C.sessions() if s.group == name]

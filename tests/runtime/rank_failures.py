"""Rank functions of test_failures.py and test_races.py."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.harness.strike import signal_before_exchange
from ub_overlap.runtime import errors, ops, plan_store, settings
from ub_overlap.runtime.schedule.encode import provide as proven

from . import rank_ops
from .oracle import data
from .rank_sessions import C, gather, reset, scatter


def attempt(body: Callable[[], Any]) -> dict[str, Any]:
    """Return the error that `body` raised, as plain data, with the elapsed seconds."""
    begin = time.monotonic()
    try:
        body()
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  (reported to the test)
        return {
            "error": type(error).__name__,
            "text": str(error),
            "ranks": getattr(error, "ranks", None),
            "cause": type(error.__cause__).__name__,
            "seconds": time.monotonic() - begin,
            "ours": isinstance(error, errors.UbOverlapError),
        }
    return {"error": "", "text": "", "seconds": time.monotonic() - begin}


def fresh(world: int) -> str:
    return dist.new_group(list(range(world))).group_name


def never_calls(rank: int, world: int, step_s: float) -> list[dict[str, Any]]:
    """The last rank skips its second call. Return also the error of a later call."""
    name = fresh(world)
    with reset():
        gather(name, rank, world, 4)
        dist.barrier()
        settings.configure(step_timeout_s=step_s)
        found = [attempt(lambda: rank == world - 1 or gather(name, rank, world, 4))]
        dist.barrier()
        settings.configure(step_timeout_s=100.0)
        return [*found, attempt(lambda: gather(name, rank, world, 4))]


def plain_collective(rank: int, world: int, how: str, timeout_s: float) -> dict[str, Any]:
    """Rank 1 skips a site that runs a plain collective: the group has no transport, or the strategy is "none"."""
    group = dist.new_group(list(range(world)), timeout=timedelta(seconds=timeout_s))
    with reset():
        if how == "hosts":
            C.testing.set_host_id(f"host{rank}:boot:1")
        call = {"strategy": "pipelined" if how == "hosts" else "none", "site": "/plain"}
        gather(group.group_name, rank, world, 4, **call)
        found = attempt(lambda: rank == 1 or gather(group.group_name, rank, world, 4, **call))
        dist.barrier()
        return found


def ranges(rank: int, world: int) -> tuple[dict[str, Any], list[str]]:
    """Return the error of the last of four calls, and the recorded NVTX ranges.

    Rank 1 passes another shape to the last call. The first call runs before NVTX is enabled and has no range.
    """
    name = fresh(world)
    with reset():
        C.testing.count_ranges(True)
        gather(name, rank, world, 4)
        settings.configure(nvtx=True)
        try:
            gather(name, rank, world, 4, site="plan/forward.0")
            scatter(name, rank, world, 4, site="plan/forward.1")
            failed = attempt(lambda: gather(name, rank, world, 5 if rank == 1 else 4, site="plan/backward.0"))
        finally:
            settings.configure(nvtx=False)
        return failed, C.testing.ranges()


def never_binds(rank: int, world: int, init_s: float) -> dict[str, Any]:
    name = fresh(world)
    with reset():
        settings.configure(init_timeout_s=init_s)
        found = attempt(lambda: rank == 1 or gather(name, rank, world, 4))
        dist.barrier()
        return found


def other_shapes(rank: int, world: int, rows: int) -> dict[str, Any]:
    """Rank 1 passes `rows` rows and the other ranks pass 4, after one matching call."""
    name = fresh(world)
    gather(name, rank, world, 4)
    return attempt(lambda: gather(name, rank, world, rows if rank == 1 else 4))


def other_sites(rank: int, world: int) -> dict[str, Any]:
    name = fresh(world)
    gather(name, rank, world, 4, site="/first")
    work = scatter if rank == 1 else gather
    return attempt(lambda: work(name, rank, world, 4, site=f"/of.{work.__name__}"))


def other_plans(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Rank 1 compiles a different plan, whose second site uses the bulk strategy."""
    os.environ["UB_OVERLAP_CACHE_DIR"] = folder
    name = fresh(world)
    digest = "aaaaaaaa11111111" if rank != 1 else "bbbbbbbb22222222"
    strategies = ["pipelined", "bulk" if rank == 1 else "pipelined"]
    sites = [{"id": f"forward.{i}", "kind": "all_gather_matmul", "strategy": s} for i, s in enumerate(strategies)]
    plan_store.save(digest, json.dumps({"shared": {"sites": sites}}))
    return attempt(lambda: gather(name, rank, world, 4, site=f"{digest}/forward.0"))


def planned_for_others(rank: int, world: int, folder: str) -> list[dict[str, Any]]:
    """A graph that was compiled for three ranks runs on a group of two, or of one."""
    os.environ["UB_OVERLAP_CACHE_DIR"] = folder
    plan_store.save("e" * 16, json.dumps({"graph": "0", "shared": {"sites": [{"id": "forward.0", "ranks": 3}]}}))
    alone = [dist.new_group([r]) for r in range(world)][rank].group_name
    site = f"{'e' * 16}/forward.0"
    name = fresh(world)
    return [attempt(lambda: gather(name, rank, world, 4, site=site)), attempt(lambda: gather(alone, 0, 1, 4, site=site))]


def same_plans(rank: int, world: int) -> dict[str, Any]:
    name = fresh(world)
    return attempt(lambda: [gather(name, rank, world, 4, site=f"cccccccc33333333/forward.{i}") for i in range(4)])


def raises_alone(rank: int, world: int) -> dict[str, Any]:
    """Rank 1 cannot build its schedule, and the other ranks are notified."""
    name = fresh(world)
    gather(name, rank, world, 4)

    def refuse(key: Any, rank: int) -> Any:
        raise MemoryError("no room for schedules")

    with reset():
        settings.configure(step_timeout_s=60.0)
        if rank == 1:
            C.set_provider(refuse)
        try:
            return attempt(lambda: gather(name, rank, world, 4, strategy=f"pipelined:chunks={5 * world}"))
        finally:
            C.set_provider(ops.ScheduleProvider())


def unknown_compute_kind(rank: int, world: int) -> dict[str, Any]:
    """Every rank gets a schedule with a compute step of a kind that no executor has."""
    name = fresh(world)

    def provide(key: Any, rank: int) -> list[tuple[int, ...]]:
        return [(3, 0, -1, 0, 7, 0, 0, 0, 0, 0)]

    with reset():
        C.set_provider(provide)
        try:
            return attempt(lambda: gather(name, rank, world, 4))
        finally:
            C.set_provider(ops.ScheduleProvider())


def bad_arguments(rank: int, world: int) -> list[str]:
    """Errors that a rank detects locally leave the group usable."""
    name = rank_ops.group()
    a, b = data(4, 6, seed=1), data(6, 3, seed=2)
    call = torch.ops.ub_overlap.all_gather_matmul
    tries = [
        attempt(lambda: call(a, [b], [False], [False], 1, False, False, [], [], "sometimes", name, "/x")),
        attempt(lambda: call(a, [b], [False], [False], 1, False, False, [], [], "pipelined:chunks=0", name, "/x")),
        attempt(lambda: call(a, [b], [False], [False], 1, False, False, [], [], "pipelined:chunks=99999", name, "/x")),
        attempt(lambda: call(a, [b], [False], [False], 1, False, False, [], [], "pipelined:stripes=2", name, "/x")),
        attempt(lambda: call(a, [b], [False], [False], 1, False, False, [], [], "bulk:stripes=2", name, "/x")),
        attempt(lambda: torch.ops.ub_overlap.bulk(a, [], [], "all_gather", "sum", a.dtype, "pipelined:stripes=2", name, "/x")),
        attempt(lambda: call(a, [b], [False], [], 1, False, False, [], [], "pipelined", name, "/x")),
        attempt(lambda: call(a, [b], [True], [False], 1, False, False, [], [], "pipelined", name, "/x")),
        attempt(lambda: call(a, [b], [False], [False], 3, False, False, [], [], "pipelined", name, "/x")),
        attempt(lambda: call(a.double(), [b.double()], [False], [False], 1, False, False, [], [], "pipelined", name, "/x")),
        attempt(lambda: call(a, [b], [False], [False], 1, False, False, [a], [], "pipelined", name, "/x")),
        attempt(lambda: call(a, [b], [False], [False], 1, False, False, [b], [b], "pipelined", name, "/x")),
        attempt(lambda: call(a, [], [], [], 1, False, False, [a], [b], "pipelined", name, "/x")),
        attempt(lambda: call(a, [b.half()], [False], [False], 1, False, False, [], [], "pipelined", name, "/x")),
        attempt(
            lambda: torch.ops.ub_overlap.matmul_reduce_scatter(
                [a], [b], None, 1, False, "max", a.dtype, False, "plain", [], [], "pipelined", name, "/x"
            )
        ),
        attempt(
            lambda: torch.ops.ub_overlap.matmul_reduce_scatter(
                [data(2 * world + 1, 6, seed=1)],
                [b],
                None,
                1,
                False,
                "sum",
                a.dtype,
                False,
                "plain",
                [],
                [],
                "pipelined",
                name,
                "/x",
            )
        ),
    ]
    wrong = [f"{t['error']}: {t['text']}" for t in tries if t["error"] != "OptionError"]
    return wrong + gather(name, rank, world, 4)


class _Gather(torch.autograd.Function):
    """A gather whose backward runs a ub_overlap op, as in compiled graphs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, name: str) -> torch.Tensor:  # type: ignore[override]
        ctx.name = name
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        out, _ = torch.ops.ub_overlap.bulk(grad, [], [], "all_reduce", "sum", grad.dtype, "bulk", ctx.name, "/backward")
        return out, None


def in_backward(rank: int, world: int, compiled: bool) -> dict[str, Any]:
    """Rank 1 skips its backward. The other rank raises a ub_overlap error, eager and compiled, not a RuntimeError."""
    name = fresh(world)

    def step(x: torch.Tensor) -> torch.Tensor:
        return _Gather.apply(x, name).sum()

    run = torch.compile(step, fullgraph=True) if compiled else step
    with reset():
        settings.configure(step_timeout_s=2.0)
        x = data(4, 4, seed=1).requires_grad_()
        run(x).backward()
        loss = run(x)
        dist.barrier()
        found = attempt(lambda: rank == 1 or loss.backward())
        dist.barrier()
        if rank == 0 and x.grad is not None and not torch.equal(x.grad, torch.full((4, 4), float(world))):
            found["text"] += " AND the gradient changed"
        return found


def dies(rank: int, world: int, how: str, step_s: float) -> Any:
    """Rank 1 kills or stops itself between two of its steps."""
    name = rank_ops.group()
    settings.configure(step_timeout_s=step_s, init_timeout_s=30.0)
    gather(name, rank, world, 4)
    dist.barrier()
    if rank == 1:
        if how.endswith("during"):
            C.testing.set_step_delays({2: 60_000_000})  # between its first matmul and the copy of that matmul
            threading.Timer(0.5, os.kill, (os.getpid(), getattr(signal, how.partition("-")[0]))).start()
        else:
            os.kill(os.getpid(), getattr(signal, how))
    found = [attempt(lambda: scatter(name, rank, world, 4000))]
    return [*found, attempt(lambda: gather(name, rank, world, 4))]


def dies_binding(rank: int, world: int) -> Any:
    """Rank 1 dies once it has mapped its peer's memory."""
    settings.configure(init_timeout_s=100.0)
    if rank == 1:
        signal_before_exchange("attached", "SIGKILL")
    return attempt(lambda: gather(rank_ops.group(), rank, world, 4))


def store_ends(rank: int, world: int, how: str, init_s: float) -> Any:
    """Rank 0 hosts the Store and is killed or stopped. The other ranks then run a new plan, which needs a comparison."""
    first = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        first.set("second", str(store.port))
    else:
        store = dist.TCPStore("127.0.0.1", int(first.get("second")), is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    settings.configure(init_timeout_s=init_s)
    gather(rank_ops.group(), rank, world, 4)
    dist.barrier()
    if rank == 0:
        os.kill(os.getpid(), getattr(signal, how))
    time.sleep(0.3)
    return attempt(lambda: gather(rank_ops.group(), rank, world, 4, site="dddddddd44444444/forward.0"))


def interrupted(rank: int, world: int, binding: bool) -> Any:
    """Rank 0 gets Ctrl-C while it waits for rank 1, in the first call or a later one. Rank 1 is a second late."""
    name = rank_ops.group()
    settings.configure(init_timeout_s=60.0, step_timeout_s=60.0)
    if not binding:
        gather(name, rank, world, 4)
    dist.barrier()
    if rank == 0:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    else:
        time.sleep(1.0)
    return attempt(lambda: gather(name, rank, world, 4))


def forks(rank: int, world: int) -> Any:
    """A forked child calls an op on its parent's group. The parent continues."""
    name = rank_ops.group()
    gather(name, rank, world, 4)
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        found = attempt(lambda: gather(name, rank, world, 4))
        os.write(send, json.dumps(found).encode())
        os._exit(0)
    os.waitpid(child, 0)
    return json.loads(os.read(receive, 100_000)), gather(name, rank, world, 6)


def no_room(rank: int, world: int) -> Any:
    """A call requests more shared memory than exists."""
    name = fresh(world)
    gather(name, rank, world, 4)
    shard = torch.empty(1, dtype=torch.bfloat16).expand(1 << 20, 1 << 18)  # half a terabyte, in two bytes
    with reset():
        settings.configure(step_timeout_s=5.0)
        return attempt(lambda: C.ShmArena(rank=0, ranks=2, slot_bytes=shard.numel()))


# ---- races ------------------------------------------------------------------------------------------------------------------


def hammer(rank: int, world: int, kind: str, times: int, delay_us: int) -> list[str]:
    """Back-to-back calls with changing data and random delays before every step give correct results."""
    name, bad = rank_ops.group(), []
    with reset():
        C.testing.set_random_delay(delay_us, 7 * rank + 1)
        for i in range(times):
            if kind != "scatter":
                bad += gather(
                    name, rank, world, 5 + i % 3, seed=i, strategy=("pipelined", f"pipelined:chunks={2 * world}")[i % 2]
                )
            if kind != "gather":
                bad += scatter(name, rank, world, 4 + i % 2, seed=i, strategy=("pipelined", "direct")[i // 2 % 2])
            if kind == "mixed":
                mine = data(7, seed=i + rank)
                out, _ = torch.ops.ub_overlap.bulk(mine, [], [], "all_reduce", "sum", mine.dtype, "bulk", name, "/bulk")
                want = sum(data(7, seed=i + r).double() for r in range(world))
                bad += [] if torch.allclose(out.double(), want, atol=1e-5) else [f"bulk {i}"]
    return bad[:5]


def without_done(rank: int, world: int, waits: bool, times: int) -> list[str]:
    """Run gathers in which rank 0 reads received data late and rank 1 runs ahead.

    `waits`: keep the waits for free slots, else remove them. Rank 1 has no waits for data, which would delay it too.
    """

    def provide(key: tuple[Any, ...], me: int) -> list[tuple[int, ...]]:
        rows = proven(key, me)
        frees = [i for i, row in enumerate(rows) if row[0] == 2 and row[1] == 1]
        deaf = [i for i, row in enumerate(rows) if row[0] == 2 and row[1] == 0 and me == 1]
        return [row for i, row in enumerate(rows) if i not in deaf and (waits or i not in frees)]

    name, bad = fresh(world), []
    C.set_provider(provide)
    try:
        with reset():
            settings.configure(step_timeout_s=10.0)
            rows = provide(("all_gather_matmul", world, 0, (False,), 0, 0, False, False), rank)
            slow = max(i for i, row in enumerate(rows) if row[0] == 3)  # the matmul on received data
            C.testing.set_step_delays({slow: 20_000}, only_rank=0)
            for i in range(times):
                bad += [f"call {i}: {b}" for b in gather(name, rank, world, 6, seed=1000 * i)]
    except errors.UbOverlapError as error:
        bad.append(f"{type(error).__name__}: {error}")
    finally:
        C.set_provider(ops.ScheduleProvider())
        dist.barrier()
    return bad

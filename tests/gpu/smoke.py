"""The CUDA executor on real GPUs, self-checking: torchrun --nproc-per-node 2 tests/gpu/smoke.py [--skip-timing] [--only TEXT]

Every op in several shapes, dtypes and strategies against fp64 and against NCCL + matmul; back-to-back calls under random
delays, bitwise; two streams; a captured graph; times; a peer at another site, with another shape, and one that never comes.
Prints one table last, and exits with 0 if every row is good. A case that outlasts its deadline ends the program, with the table
so far.
"""

# ruff: noqa: B023   the environment comes before torch; cases run as soon as they are named

from __future__ import annotations

import argparse
import faulthandler
import os
import random
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

import torch
import torch.distributed as dist
from inputs import BF16, DEVICE, F16, F32, RANK, WORLD, bulk_case, gather_case, randn, reduce_case, scatter_case

from ub_overlap import _torch_compat
from ub_overlap.runtime import errors, ops, reference, session, settings

SLACK = {F32: 2e-6, BF16: 4e-3, F16: 1e-3}
ROWS: list[tuple[str, str, str]] = []


def say(*what: Any) -> None:
    if RANK == 0:
        print(*what, flush=True)


def table() -> str:
    width = max([len(row[0]) for row in ROWS], default=10)
    lines = [f"{'case':<{width}}  result  notes", "-" * (width + 30)]
    return "\n".join([*lines, *(f"{name:<{width}}  {result:<6}  {note}" for name, result, note in ROWS)])


class Deadline:
    """Ends the process when the body takes longer: nothing else gets a thread out of a driver call."""

    def __init__(self, name: str, seconds: float) -> None:
        self.name, self.timer = name, threading.Timer(seconds, self._over)
        self.timer.daemon = True

    def _over(self) -> None:
        print(f"rank {RANK}: {self.name}: DEADLINE", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(all_threads=True)
        ROWS.append((self.name, "HANG", f"rank {RANK}"))
        print(table(), flush=True)
        os._exit(3)

    def __enter__(self) -> None:
        self.timer.start()

    def __exit__(self, *_: object) -> None:
        self.timer.cancel()


class Runner:
    """Runs cases in step on all ranks; after a failure the next case gets a new group, for the old one is out of step."""

    def __init__(self, only: str) -> None:
        self.only = only
        self.control = dist.new_group(backend="gloo", timeout=timedelta(seconds=90))
        self.group = self.fresh()

    def fresh(self) -> str:
        return str(dist.new_group(backend="nccl").group_name)

    def __call__(self, name: str, body: Callable[[str], str], seconds: float = 60, own_group: bool = False) -> None:
        if self.only not in name:
            return
        group = self.fresh() if own_group else self.group
        error, note = "", ""
        with Deadline(name, seconds):
            try:
                note = body(group)
                torch.cuda.synchronize()
                if not own_group:
                    session.check()
            except Exception as caught:  # noqa: BLE001  any error is a row
                error = f"rank {RANK}: {type(caught).__name__}: {str(caught).splitlines()[0] if str(caught) else ''}"
                print(f"--- {name}, rank {RANK}\n{traceback.format_exc()}", file=sys.stderr, flush=True)
            all_errors: list[Any] = [None] * WORLD
            dist.all_gather_object(all_errors, error, group=self.control)
        bad = [text for text in all_errors if text]
        ROWS.append((name, "FAIL" if bad else "ok", "; ".join(bad)[:300] if bad else note))
        say(f"[{time.strftime('%H:%M:%S')}] {ROWS[-1]}")
        if bad:
            session.close((own_group and group) or self.group, "cuda")
            self.group = self.fresh()


def flat(results: Any) -> list[torch.Tensor]:
    return [t for r in results for t in (r if isinstance(r, list | tuple) else [r])]


def run_op(op: str, args: tuple[Any, ...], strategy: str, group: str, site: str) -> list[torch.Tensor]:
    return flat(getattr(torch.ops.ub_overlap, op)(*args, strategy, group, site))


def run_plain(op: str, args: tuple[Any, ...], group: str) -> list[torch.Tensor]:
    return flat(reference.run(op, *args, group))


def doubled(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.double()
    if isinstance(value, list):
        return [doubled(v) for v in value]
    return torch.float64 if isinstance(value, torch.dtype) else value


def compare(op: str, args: tuple[Any, ...], strategy: str, group: str, site: str) -> str:
    world = dist.group.WORLD.group_name
    exact, plain = run_plain(op, tuple(map(doubled, args)), world), run_plain(op, args, world)
    ours = run_op(op, args, strategy, group, site)
    torch.cuda.synchronize()
    session.check(group)
    worst = worst_plain = 0.0
    for i, (a, b, c) in enumerate(zip(ours, plain, exact, strict=True)):
        if a.shape != c.shape or a.dtype != b.dtype:
            raise AssertionError(f"output {i}: {tuple(a.shape)} {a.dtype}, expected {tuple(c.shape)} {b.dtype}")
        if not a.numel():
            continue
        scale = c.abs().max().item() or 1.0
        mine, theirs = (a.double() - c).abs().max().item() / scale, (b.double() - c).abs().max().item() / scale
        if not mine <= 1.5 * theirs + SLACK[a.dtype]:
            wrong = ((a.double() - c).abs() / scale > 1.5 * theirs + SLACK[a.dtype]).sum().item()
            raise AssertionError(f"output {i}: error {mine:.3g}, NCCL + matmul {theirs:.3g}; {wrong} of {a.numel()} wrong")
        worst, worst_plain = max(worst, mine), max(worst_plain, theirs)
    return f"error {worst:.2g}, NCCL + mm {worst_plain:.2g}"


def correctness(runner: Runner) -> None:
    g, s = "all_gather_matmul", "matmul_reduce_scatter"
    for dtype in (F32, BF16):
        cases: list[tuple[str, str, Callable[[], tuple[Any, ...]], str]] = [
            (g, "mode 0", lambda: gather_case(dtype, 1, 128, 256, [0], False, False), "pipelined"),
            (g, "modes 0 2 keep, outer 2", lambda: gather_case(dtype, 2, 64, 128, [0, 2], False, True), "pipelined"),
            (g, "modes 1 3, chunks 4", lambda: gather_case(dtype, 1, 96, 128, [1, 3], False, False), "pipelined:chunks=4"),
            (g, "last, modes 0 2 keep", lambda: gather_case(dtype, 1, 96, 64, [0, 2], True, True), "pipelined"),
            (g, "odd sizes", lambda: gather_case(dtype, 3, 7, 13, [0, 1, 2, 3], False, True), "pipelined:chunks=6"),
            (g, "large, grows", lambda: gather_case(dtype, 1, 1024, 2048, [0, 0], False, False), "pipelined"),
            (s, "plain", lambda: scatter_case(dtype, 1, 128, 256, False), "pipelined"),
            (s, "outer 2, bias, keep", lambda: scatter_case(dtype, 2, 64, 128, False, bias=True, keep=True), "pipelined"),
            (
                s,
                "two terms, chunks 4, avg",
                lambda: scatter_case(dtype, 1, 96, 128, False, depths=[64, 96], by="avg"),
                "pipelined:chunks=4",
            ),
            (s, "last", lambda: scatter_case(dtype, 1, 96, 64, True), "pipelined"),
            (s, "odd sizes, out fp32", lambda: scatter_case(dtype, 3, 7, 13, False, out_dtype=F32), "pipelined:chunks=6"),
            ("matmul_all_reduce", "even, keep", lambda: reduce_case(dtype, 256, 128, 64, "sum", True), "pipelined"),
            (
                "matmul_all_reduce",
                "odd rows, avg, chunks 4",
                lambda: reduce_case(dtype, 131, 77, 64, "avg", False),
                "pipelined:chunks=4",
            ),
            ("bulk", "all_gather", lambda: bulk_case(dtype, "all_gather", 64, 128), "bulk"),
            ("bulk", "reduce_scatter", lambda: bulk_case(dtype, "reduce_scatter", 64 * WORLD, 128, "avg"), "bulk:chunks=4"),
            ("bulk", "all_reduce, odd", lambda: bulk_case(dtype, "all_reduce", 67, 31), "bulk"),
        ]
        for op, what, make, strategy in cases:
            name = f"{op} {str(dtype)[6:]} {what}"
            runner(name, lambda group: compare(op, make(), strategy, group, name))
    runner(
        "all_gather_matmul float16",
        lambda group: compare(g, gather_case(F16, 1, 64, 128, [0, 2], False, True), "pipelined", group, "f16"),
    )
    runner(
        "matmul_reduce_scatter float16",
        lambda group: compare(s, scatter_case(F16, 1, 64, 128, False), "pipelined", group, "f16"),
    )


KINDS: dict[str, Callable[[], tuple[str, tuple[Any, ...], str]]] = {
    "AG": lambda: ("all_gather_matmul", gather_case(BF16, 1, 256, 512, [0, 2], False, True), "pipelined"),
    "RS": lambda: ("matmul_reduce_scatter", scatter_case(BF16, 1, 256, 512, False), "pipelined:chunks=4"),
    "AR": lambda: ("matmul_all_reduce", reduce_case(BF16, 301, 256, 128, "sum", False), "pipelined"),
    "bulk": lambda: ("bulk", bulk_case(BF16, "all_gather", 256, 512), "bulk"),
}


def race(group: str, kinds: list[str], calls: int, streams: int = 1) -> str:
    """Back-to-back calls with changing data and random delays, against what the same calls gave one at a time."""
    inputs = [KINDS[kind]() for kind in kinds for _ in range(4)]
    first = []
    for i, (op, args, strategy) in enumerate(inputs):
        first.append([t.clone() for t in run_op(op, args, strategy, group, f"race {op}")])
        torch.cuda.synchronize()
        session.check(group)
        for a, b in zip(first[-1], run_plain(op, args, dist.group.WORLD.group_name), strict=True):
            if not torch.allclose(a.float(), b.float(), rtol=0.05, atol=0.3):
                raise AssertionError(f"the call number {i} alone is wrong already ({op})")
    order, mine = random.Random(7), random.Random(1000 + RANK)
    lanes = [torch.cuda.Stream() for _ in range(streams)] if streams > 1 else [torch.cuda.current_stream()]
    torch.cuda.synchronize()
    results = []
    for call in range(calls):
        which = order.randrange(len(inputs))
        if mine.random() < 0.3:
            time.sleep(mine.random() * 0.005)
        with torch.cuda.stream(lanes[call % len(lanes)]):
            if mine.random() < 0.3:
                torch.cuda._sleep(int(mine.random() * 5e6))
            op, args, strategy = inputs[which]
            results.append((which, run_op(op, args, strategy, group, f"race {op}")))
    torch.cuda.synchronize()
    session.check(group)
    for call, (which, outs) in enumerate(results):
        for i, (a, b) in enumerate(zip(outs, first[which], strict=True)):
            if not torch.equal(a, b):
                raise AssertionError(
                    f"call {call} ({inputs[which][0]}), output {i}: {(a != b).sum().item()} of {a.numel()} differ"
                )
    return f"{calls} calls, bitwise"


def graph(group: str) -> str:
    """A captured AG and RS, replayed with changing inputs, eager calls in between."""
    torch.manual_seed(50 + RANK)
    weight, second = randn(512, 384, dtype=BF16, scale=0.1), randn(384, 512, dtype=BF16, scale=0.1)
    static = randn(1, 256, 512, dtype=BF16)

    def step(x: torch.Tensor) -> torch.Tensor:
        _, (h,) = torch.ops.ub_overlap.all_gather_matmul(x, [weight], [0], 1, False, False, "pipelined", group, "graph.ag")
        return torch.ops.ub_overlap.matmul_reduce_scatter(
            [h], [second], None, 1, False, "sum", BF16, False, "pipelined", group, "graph.rs"
        )[0]

    inputs = [randn(1, 256, 512, dtype=BF16) for _ in range(5)]
    expected = [step(x).clone() for x in inputs]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(static)
    torch.cuda.synchronize()
    dist.barrier()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        out = step(static)
    for i in range(30):
        static.copy_(inputs[i % 5])
        captured.replay()
        got = [out.clone()]
        if i % 7 == 3:
            got.append(step(inputs[i % 5]))
        torch.cuda.synchronize()
        session.check(group)
        for which, value in enumerate(got):
            if not torch.equal(value, expected[i % 5]):
                raise AssertionError(f"replay {i}, {'eager call' if which else 'replay'}: wrong")
    return "30 replays, eager calls between"


def medians(bodies: dict[str, Callable[[], Any]], count: int = 20, warm: int = 5) -> dict[str, tuple[float, float]]:
    """name -> (ms on the device, ms of host time), medians, the worst rank's; the bodies take turns."""
    token = torch.zeros(1, device=DEVICE)
    device: dict[str, list[float]] = {name: [] for name in bodies}
    host: dict[str, list[float]] = {name: [] for name in bodies}
    for turn in range(count + warm):
        for name, body in bodies.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            dist.all_reduce(token)  # the ranks start together
            begin.record()
            clock = time.perf_counter()
            body()
            clock = time.perf_counter() - clock
            end.record()
            torch.cuda.synchronize()
            if turn >= warm:
                device[name].append(begin.elapsed_time(end))
                host[name].append(clock * 1e3)
    worst = torch.tensor([[statistics.median(device[n]), statistics.median(host[n])] for n in bodies], device=DEVICE)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return {name: (row[0], row[1]) for name, row in zip(bodies, worst.tolist(), strict=True)}


def timing(group: str) -> str:
    rows, hidden, wide = 8192, 8192, 57344 // 8
    shard, weight = randn(rows // WORLD, hidden, dtype=BF16), randn(wide, hidden, dtype=BF16, scale=0.02).t()
    gathered = torch.empty(rows, hidden, device=DEVICE, dtype=BF16)
    whole = randn(rows, hidden, dtype=BF16)
    depth = 28672 // 8
    left, right = randn(rows, depth, dtype=BF16), randn(hidden, depth, dtype=BF16, scale=0.02).t()
    reduced = torch.empty(rows // WORLD, hidden, device=DEVICE, dtype=BF16)

    def nccl_ag() -> torch.Tensor:
        dist.all_gather_into_tensor(gathered, shard)
        return gathered @ weight

    def nccl_rs() -> torch.Tensor:
        dist.reduce_scatter_tensor(reduced, left @ right)
        return reduced

    def ag(strategy: str) -> Callable[[], Any]:
        return lambda: torch.ops.ub_overlap.all_gather_matmul(
            shard.unsqueeze(0), [weight], [0], 1, False, False, strategy, group, f"time.ag.{strategy}"
        )

    def rs(strategy: str) -> Callable[[], Any]:
        return lambda: torch.ops.ub_overlap.matmul_reduce_scatter(
            [left], [right], None, 1, False, "sum", BF16, False, strategy, group, f"time.rs.{strategy}"
        )

    strategies = ("pipelined", "pipelined:chunks=4", "pipelined:chunks=8")
    bodies: dict[str, Callable[[], Any]] = {"AG matmul alone": lambda: whole @ weight, "AG nccl + cublas": nccl_ag}
    bodies |= {f"AG {s}": ag(s) for s in strategies}
    bodies |= {"RS matmul alone": lambda: left @ right, "RS nccl + cublas": nccl_rs}
    bodies |= {f"RS {s}": rs(s) for s in strategies}
    for name, (device, host) in medians(bodies).items():
        ROWS.append((f"time {name}", f"{device:.3f}", f"ms; host {host:.3f} ms"))
        say(ROWS[-1])
    session.check(group)
    ratios = {row[0]: float(row[1]) for row in ROWS if row[0].startswith("time ")}
    best = {kind: min(ratios[f"time {kind} {s}"] for s in strategies) for kind in ("AG", "RS")}
    return ", ".join(f"{kind} best {ratios[f'time {kind} nccl + cublas'] / best[kind]:.2f}x NCCL + cuBLAS" for kind in best)


def small_gather(group: str, rows: int, site: str) -> list[torch.Tensor]:
    shard = torch.ones(1, rows, 64, device=DEVICE)
    return run_op(
        "all_gather_matmul", (shard, [torch.ones(64, 32, device=DEVICE)], [0], 1, False, True), "pipelined", group, site
    )


def expect(error: type, body: Callable[[], Any]) -> Any:
    try:
        body()
    except error as caught:
        return caught
    except Exception as caught:
        raise AssertionError(f"{type(caught).__name__} instead of {error.__name__}: {caught}") from caught
    raise AssertionError(f"no {error.__name__}")


def mismatch(group: str, error: type, rows: tuple[int, int], sites: tuple[str, str]) -> str:
    small_gather(group, 32, "before")
    torch.cuda.synchronize()
    outs = small_gather(group, rows[min(RANK, 1)], sites[min(RANK, 1)])
    torch.cuda.synchronize()
    caught = expect(error, lambda: session.check(group))
    if not outs[0].isnan().all() or not outs[1].isnan().all():
        raise AssertionError("the output is not poisoned")
    expect(errors.SessionPoisonedError, lambda: small_gather(group, 32, "after"))
    return str(caught).splitlines()[0]


def absent(group: str, store: Any, seconds: float) -> str:
    """Rank 1 never comes to a call: all ranks get PeerTimeoutError, and it names rank 1."""
    for _ in range(3):
        small_gather(group, 32, "before")
    torch.cuda.synchronize()
    session.check(group)
    before = settings.current().step_timeout_s
    settings.configure(step_timeout_s=seconds)
    try:
        note = ""
        if RANK != 1:
            clock = time.monotonic()
            outs = small_gather(group, 32, "absent")
            torch.cuda.synchronize()
            took = time.monotonic() - clock
            caught = expect(errors.PeerTimeoutError, lambda: session.check(group))
            if caught.ranks != (1,) or not 0.8 * seconds < took < 2 * seconds:
                raise AssertionError(f"after {took:.1f} s, naming {caught.ranks}: {caught}")
            if not outs[0].isnan().all() or not outs[1].isnan().all():
                raise AssertionError("the output is not poisoned")
            expect(errors.SessionPoisonedError, lambda: small_gather(group, 32, "after"))
            note = f"after {took:.1f} s: {str(caught).splitlines()[0]}"
        store.set(f"smoke/absent/{RANK}", "1")
        if RANK == 1:
            store.wait([f"smoke/absent/{rank}" for rank in range(WORLD)], timedelta(seconds=4 * seconds))
            expect(errors.PeerTimeoutError, lambda: session.check(group))
        return note
    finally:
        store.set(f"smoke/absent/{RANK}", "1")
        settings.configure(step_timeout_s=before)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--skip-timing", action="store_true")
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    options = parser.parse_args()
    torch.cuda.set_device(DEVICE)
    with Deadline("start", 120):
        dist.init_process_group("nccl", device_id=DEVICE, timeout=timedelta(seconds=90))
        dist.barrier()
        store = _torch_compat.store_of(dist.group.WORLD)
        torch.manual_seed(RANK)
        settings.configure(step_timeout_s=20, init_timeout_s=60)
        say(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, {WORLD} ranks, {ops.extension().build_info()}")
        runner = Runner(options.only)

    def transport(group: str) -> str:
        small_gather(group, 32, "first")
        core = next(core for core in ops.extension().sessions() if core.group == group)
        if core.transport != "symmetric memory":
            raise AssertionError(f"transport {core.transport}: {core.reason}")
        return str(core.transport)

    runner("transport", transport, seconds=90)
    correctness(runner)
    for kinds in (["AG"], ["RS"], ["AR"], ["bulk"], list(KINDS)):
        runner(f"race {'+'.join(kinds)}", lambda group: race(group, kinds, 50))
    runner("race on two streams", lambda group: race(group, list(KINDS), 50, streams=2))
    if not options.skip_timing:
        runner("timing", timing, seconds=120)
    runner("graph", graph, own_group=True)
    runner(
        "fault: another site", lambda group: mismatch(group, errors.SiteMismatchError, (32, 32), ("one", "two")), own_group=True
    )
    runner(
        "fault: another shape",
        lambda group: mismatch(group, errors.ShapeMismatchError, (32, 40), ("one", "one")),
        own_group=True,
    )
    runner("fault: a peer does not come", lambda group: absent(group, store, 5), own_group=True)
    say(table())
    bad = [row for row in ROWS if row[1] in ("FAIL", "HANG")]
    say(f"{len(bad)} of {len(ROWS)} rows are bad")
    sys.stdout.flush()
    with Deadline("end", 60):
        dist.barrier(group=runner.control)
        session.close()
        dist.destroy_process_group()
    return 1 if bad else 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # whatever state the device is in

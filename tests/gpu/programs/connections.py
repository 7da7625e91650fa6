"""CUDA_DEVICE_MAX_CONNECTIONS = 1, 8, 32: every op is right and none hangs; medians of the times side by side.

    python tests/gpu/programs/connections.py --ranks 4 [--quick] [--device cpu]

The variable counts when CUDA starts, so each value has a torchrun of its own. A hang or a wrong number is a failure; a
slow-down is told, not judged.
"""

# ruff: noqa: E402   the path comes first

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[3])

from tests.gpu.frame import Frame, options, text_table  # isort: skip

import torch
import torch.distributed as dist

from tests.gpu import cases
from tests.gpu.cases import AG, AR, BF16, BULK, RS, Maker, Truth
from tests.gpu.launch import torchrun
from tests.gpu.programs import functions, graphs
from ub_overlap.runtime.session import session

VALUES = (1, 8, 32)


def medians(frame: Frame, bodies: dict[str, Callable[[], Any]], count: int, warm: int = 3) -> dict[str, float]:
    """name -> ms on the device (on the CPU: of the thread), median, the worst rank's; the bodies take turns."""
    token = torch.zeros(1, device=frame.device)
    times: dict[str, list[float]] = {name: [] for name in bodies}
    for turn in range(count + warm):
        for name, body in bodies.items():
            dist.all_reduce(token)  # the ranks start together
            if frame.cuda:
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                body()
                end.record()
                torch.cuda.synchronize()
                took = begin.elapsed_time(end)
            else:
                clock = time.perf_counter()
                body()
                took = (time.perf_counter() - clock) * 1e3
            if turn >= warm:
                times[name].append(took)
    worst = torch.tensor([statistics.median(times[name]) for name in bodies], device=frame.device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return dict(zip(bodies, worst.tolist(), strict=True))


def worker() -> int:
    """One value of the variable: rows of right or wrong, then a file with medians."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker", default="")
    with Frame("connections", parser) as frame:
        quick, make, world = frame.options.quick, Maker(frame.device, frame.ranks), frame.ranks
        plain = str(dist.group.WORLD.group_name)  # type: ignore[union-attr]
        rows = 8192 if frame.cuda else 64
        wide = 8192 if frame.cuda else 64
        made = {
            AG: make.gather(BF16, 1, rows // world, wide, [0], False, False, n=wide // 2),
            RS: make.scatter(BF16, 1, rows // world, wide, depths=[wide // 2]),
            AR: make.reduce(BF16, rows, wide, wide // 2),
            BULK: make.bulk(BF16, "all_gather", rows // world, wide),
        }

        def right(group: str, op: str, strategy: str) -> str:
            truth = Truth.of(made[op], plain)
            outs = [cases.run_op(made[op], strategy, group, f"connections.{op}.{strategy}") for _ in range(5)][-1]
            frame.sync()
            session.check(group)
            return f"error {truth.check(outs)[0]:.2g}"

        pairs = [(op, s) for op in made for s in ([BULK] if op == BULK else ["pipelined", f"pipelined:chunks={2 * world}"])]
        for op, strategy in pairs:
            frame.row(f"{op} {strategy}", lambda g, o=op, s=strategy: right(g, o, s), 45)
        # All streams in one queue: a plain call stands behind a replay of its group, and goes on when that has ended.
        if frame.cuda and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
            frame.row("a replay and a plain call of one thread", lambda g: graphs.beside(frame, g, 6), 45)
            frame.row("a turn that is never given back", lambda g: functions.held_turn(frame, g), own=True)
        if not frame.code:
            group = frame.group()
            bodies: dict[str, Callable[[], Any]] = {}
            for op, strategy in pairs:
                site = f"connections.{op}.{strategy}"
                bodies[f"{op} {strategy}"] = lambda o=op, s=strategy, n=site: cases.run_op(made[o], s, group, n)
            for op in made:
                bodies[f"{op} by NCCL + matmul"] = lambda o=op: cases.run_plain(made[o], plain)
            found: dict[str, float] = {}

            def timed(_: str) -> str:
                found.update(medians(frame, bodies, 10 if quick else 30))
                return f"{len(found)} medians"

            frame.row("times", timed, 90)
            if frame.rank == 0 and frame.options.worker:
                Path(frame.options.worker).write_text(json.dumps(found))
    return frame.code


def main() -> int:
    parser = options(argparse.ArgumentParser(description="CUDA_DEVICE_MAX_CONNECTIONS"))
    parser.add_argument("--ranks", type=int, default=0, help="default: all GPUs; 2 on the CPU")
    chosen = parser.parse_args()
    ranks = chosen.ranks or (torch.cuda.device_count() if chosen.device == "cuda" else 2)
    rows: list[tuple[str, str, str]] = []
    times: dict[int, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for value in VALUES:
            file = Path(folder, str(value))
            arguments = ["--worker", str(file), "--device", chosen.device, *(["--quick"] if chosen.quick else [])]
            done = torchrun("connections.py", ranks, arguments, limit_s=150, env={"CUDA_DEVICE_MAX_CONNECTIONS": str(value)})
            print(done.tail(), flush=True)
            rows.append((f"{value} connections: right, no hang", "ok" if done.code == 0 else "FAIL", done.why()))
            times[value] = json.loads(file.read_text()) if file.exists() else {}
    for name in times[VALUES[-1]]:
        best = times[VALUES[-1]][name]
        by_value = [f"{times[v][name]:.3f} ({times[v][name] / best:.2f}x)" if name in times[v] else "-" for v in VALUES]
        rows.append((name, f"{best:.3f}", "ms under " + ", ".join(f"{v}: {t}" for v, t in zip(VALUES, by_value, strict=True))))
    print(text_table(f"connections, {ranks} ranks", rows), flush=True)
    return int(any(row[1] == "FAIL" for row in rows))


if __name__ == "__main__":
    sys.exit(worker() if "--worker" in sys.argv else main())

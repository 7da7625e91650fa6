"""A first look at an executor in half a minute: torchrun --nproc-per-node 2 tests/gpu/smoke.py [--skip-timing] [--only TEXT]

One strategy of every op against float64, a short race, replays of a captured graph, and times beside NCCL + cuBLAS. The
whole of it is programs/ and run_all.py.
"""

# ruff: noqa: E402   the path comes first

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[2])

from tests.gpu.frame import Frame, Result  # isort: skip

import torch.distributed as dist

from tests.gpu import cases
from tests.gpu.cases import BF16, F32, Case, Maker
from tests.gpu.programs import graphs, ops, races
from tests.gpu.programs.connections import medians


def times(frame: Frame, group: str, name: str, case: Case) -> Result:
    """Medians of one op by all ways, as Llama 70B's fc1 and fc2 have it."""
    plain = str(dist.group.WORLD.group_name)  # type: ignore[union-attr]
    bodies: dict[str, Callable[[], Any]] = {"NCCL + cuBLAS": lambda: cases.run_plain(case, plain)}
    for strategy in ("pipelined", "pipelined:chunks=4", "pipelined:chunks=8"):
        bodies[strategy] = lambda s=strategy: cases.run_op(case, s, group, f"smoke.{name}.{s}")
    found = medians(frame, bodies, 20)
    best = min(ms for way, ms in found.items() if way != "NCCL + cuBLAS")
    return Result(f"{best:.3f}", "ms at best; " + ", ".join(f"{way} {ms:.3f}" for way, ms in found.items()))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--skip-timing", action="store_true")
    with Frame("smoke", parser) as frame:
        world, make = frame.ranks, Maker(frame.device, frame.ranks)
        frame.row("transport", lambda g: ops.transport(frame, g), 90)
        for dtype in (F32, BF16):
            for op in ops.LAYOUTS:
                strategy = ops.strategies(op, world, True)[0]
                name = f"{op} {str(dtype)[6:]}"
                frame.row(name, lambda g, o=op, d=dtype, s=strategy: ops.all_layouts(frame, g, world, o, d, s))
        frame.row("race, mixed", lambda g: races.loop(frame, g, races.LOOPS["mixed"], 50))
        if frame.cuda:
            frame.row("race on two streams", lambda g: races.loop(frame, g, races.LOOPS["mixed"], 50, lanes=2))
            frame.row("replays and eager calls", lambda g: graphs.alternate(frame, g, 1, 50, True))
        if not frame.options.skip_timing:
            rows, wide = (8192, 8192) if frame.cuda else (64, 64)
            gather = make.gather(BF16, 1, rows // world, wide, [0], False, False, n=7 * wide // world)
            scatter = make.scatter(BF16, 1, rows // world, wide, depths=[7 * wide // 2 // world])
            frame.row("time of a gather", lambda g: times(frame, g, "ag", gather), 90)
            frame.row("time of a scatter", lambda g: times(frame, g, "rs", scatter), 90)
    return frame.code


if __name__ == "__main__":
    sys.exit(main())

"""Recorded steps: every op with tracing on, its step times replayed through the proof's rules; and bytes that moved beside
matmuls.

    torchrun --nproc-per-node 4 tests/gpu/programs/recorded.py [--quick] [--only TEXT] [--device cpu]
"""

# ruff: noqa: E402   the path comes first

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[3])

from tests.gpu.frame import Frame, Skip  # isort: skip

import torch

from tests.gpu import cases
from tests.gpu.cases import Maker
from tests.gpu.replay import Record, Violation, replay
from ub_overlap.runtime import ops, settings, stats
from ub_overlap.runtime.schedule.builders import build_all
from ub_overlap.runtime.schedule.steps import Key
from ub_overlap.runtime.session import session


def listen(into: list[Any]) -> None:
    """From now on the keys of new schedules are noted."""
    provider = ops.Provider()

    def provide(key: tuple[Any, ...], rank: int) -> list[tuple[int, ...]]:
        into.append(key)
        return provider(key, rank)

    ops.extension().set_provider(provide)


def check(frame: Frame, key: tuple[Any, ...], site: str) -> str:
    """Replays what all ranks recorded of the last call (or replay) of a site."""
    mine: list[Record] = [tuple(r) for r in ops.extension().last_trace(site)]
    schedules = build_all(Key(*key))
    done = replay(schedules, frame.gather(mine), one_clock=not frame.cuda)
    # That the replay can fail: the same records, with the last thing done to data moved before everything.
    place = max(i for i, r in enumerate(mine) if r[1] == "COMPUTE" and r[2] in ("reduce", "matmul", "copy", "finish"))
    step, queue, kind, _, _, size = mine[place]
    early = min(r[3] for r in mine) - 10_000_000
    moved = [*mine[:place], (step, queue, kind, early, early + 1, size), *mine[place + 1 :]]
    try:
        replay(schedules, frame.gather(moved), one_clock=not frame.cuda)
    except Violation:
        pass
    else:
        raise AssertionError("the replay does not notice a step that ran too early")
    clocks = "" if not frame.cuda else f", clocks {', '.join(f'{o / 1e3:.1f}' for o in done.offsets_ns)} us"
    return f"{done.edges} edges, {done.pairs} conflicts{clocks}"


def recorded(frame: Frame, group: str, kind: str, size: int, graph: bool) -> str:
    if graph and not frame.cuda:
        raise Skip("the CPU has no graphs")
    case, strategy = Maker(frame.device, frame.ranks).kind(kind, size)
    keys: list[Any] = []
    listen(keys)
    settings.configure(trace=True)
    site = f"recorded.{kind}.{size}.{graph}"
    try:
        for _ in range(3):  # the first call learns, loads and grows
            cases.run_op(case, strategy, group, site)
        frame.sync()
        if graph:
            captured = torch.cuda.CUDAGraph()
            frame.barrier()
            with torch.cuda.graph(captured, capture_error_mode="thread_local"):
                cases.run_op(case, strategy, group, site)
            frame.barrier()
            for _ in range(3):
                captured.replay()
            frame.sync()
        session.check(group)
        note = check(frame, keys[-1], site)
    finally:
        settings.configure(trace=False)
        ops.extension().set_provider(ops.Provider())
    return note


def beside(frame: Frame, group: str, kind: str, size: int) -> str:
    """Bytes of a big op move while a matmul of the same call runs: of all ranks together."""
    make = Maker(frame.device, frame.ranks)
    if kind == "AG":
        case, strategy = make.gather(cases.BF16, 1, size, 2 * size, [0], False, False, n=2 * size), "pipelined"
    else:
        case, strategy = make.scatter(cases.BF16, 1, size, 2 * size, depths=[2 * size]), "pipelined"
    site = f"beside.{kind}.{size}"
    settings.configure(trace=True)
    try:
        for _ in range(4):
            cases.run_op(case, strategy, group, site)
            frame.sync()
            frame.barrier()
        session.check(group)
        found = stats.site_stats()[site]
    finally:
        settings.configure(trace=False)
    every = frame.gather((found.bytes_beside_matmul, found.bytes_copied))
    hidden, copied = sum(h for h, _ in every), sum(c for _, c in every)
    if not 0 < hidden <= copied:
        raise AssertionError(f"{hidden} of {copied} bytes moved beside a matmul")
    return f"{100 * hidden / copied:.0f}% of {copied / 2**20:.0f} MiB"


def main() -> int:
    with Frame("recorded") as frame:
        kinds = (
            ("AG", "AG2", "RS", "AR", "SAG", "SRS wire")
            if frame.options.quick
            else ("AG", "AG2", "RS", "RS1", "RS striped", "AR", "SAG", "SAG2", "SRS", "SRS wire", "bulk", "bulk RS")
        )
        sizes = (256, 2048) if frame.cuda and not frame.options.quick else (256,)
        for kind in kinds:
            for size in sizes:
                for graph in (False, True):
                    name = f"{kind} {size}, {'replayed graph' if graph else 'eager'}"
                    frame.row(name, lambda g, a=(kind, size, graph): recorded(frame, g, *a))
        for kind in ("AG", "RS"):
            frame.row(f"bytes beside matmuls, {kind}", lambda g, k=kind: beside(frame, g, k, 2048 if frame.cuda else 512))
    return frame.code


if __name__ == "__main__":
    sys.exit(main())

"""Kernels one after another, each until the clocks are its own.

Calls that alternate share one clock: that of the average load. A kernel that draws more power slows down the others then. Here
each runs alone for a while, and the later part of that while counts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from statistics import median
from typing import Any

import torch

from .algorithms import Algorithms
from .arrivals import Arrivals, HostLink
from .clock import Body, captured
from .engines import Quack, RandomMatmul, describe, described, distinct, ranked
from .library import KernelLibrary
from .shapes import Shape
from .speed import checked

BLOCK_S = 0.2
"""Of one kernel alone; the second half counts."""


def blocks(bodies: Mapping[str, Body], rounds: int, block_s: float = BLOCK_S) -> dict[str, dict[str, float]]:
    """Return microseconds, megahertz and watts of each, medians over rounds."""
    graphs = {}
    for name, body in bodies.items():
        body()
        graphs[name] = captured(body, 4)
    seen: dict[str, list[tuple[float, float, float]]] = {name: [] for name in graphs}
    for number in range(rounds):
        names = list(graphs)
        for name in names if number % 2 else reversed(names):
            seen[name].append(_block(graphs[name], block_s))
    keys = ("us", "mhz", "watts")
    return {name: {key: median(values[i] for values in all_) for i, key in enumerate(keys)} for name, all_ in seen.items()}


def _block(graph: torch.cuda.CUDAGraph, block_s: float) -> tuple[float, float, float]:
    _replay_for(graph, block_s / 2)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    count = _replay_for(graph, block_s / 2)
    end.record()
    mhz, watts = torch.cuda.clock_rate(), torch.cuda.power_draw() / 1e3
    end.synchronize()
    return 1e3 * begin.elapsed_time(end) / count / 4, float(mhz), watts


def _replay_for(graph: torch.cuda.CUDAGraph, seconds: float) -> int:
    """Replay for that long, never more than two replays ahead of the GPU. Returns how often."""
    until, count, marks = time.monotonic() + seconds, 0, []
    while time.monotonic() < until:
        graph.replay()
        marks.append(torch.cuda.Event())
        marks[-1].record()
        count += 1
        if len(marks) > 2:
            marks.pop(0).synchronize()
    return count


def measure(shape: Shape, library: KernelLibrary, quack: Quack | None, algorithms: Algorithms, rounds: int) -> dict[str, Any]:
    """Return microseconds, clocks and power by variant."""
    x = RandomMatmul.random(shape)
    expected = x.expected()
    number, whole = algorithms.fastest(x, shape.m)
    bodies: dict[str, Any] = {"cublas": x.whole, f"cublas searched {number}": lambda: whole(0), "pieces": x.pieces}
    number, piece = algorithms.fastest(x, shape.rows)
    bodies[f"pieces searched {number}"] = lambda: [piece(shard * shape.rows) for shard in range(shape.ranks)]
    for choice in distinct(ranked(library, x, 1), 2):
        bodies[f"whole {describe(choice)}"] = lambda choice=choice: library.matmul(*choice, x.a, x.b, x.out, 1)
    for choice in distinct(ranked(library, x, shape.ranks), 1):
        bodies[f"shards {describe(choice)}"] = lambda choice=choice: library.matmul(*choice, x.a, x.b, x.out, shape.ranks)
    if quack:
        for _, name, call in quack.ranked(x)[:2]:
            bodies[f"quack whole {name}"] = call
    for name, body in bodies.items():
        checked(x, body, name, expected)
    del expected
    return {"shape": vars(shape), "alone": blocks(bodies, rounds)}


def measure_arrivals(
    shape: Shape, library: KernelLibrary, link: HostLink, rate: float, found: dict[str, float], rounds: int
) -> dict[str, Any]:
    """Return microseconds, clocks and power while shards arrive. `found`: of arrivals.py; its kernels are taken."""
    x = RandomMatmul.random(shape)
    one = Arrivals(library, x, link, rate)
    bodies: dict[str, Any] = {"whole": x.whole, "pieces 1": one.step(one.pieces(1)), "pieces 2": one.step(one.pieces(2))}
    for name in found:
        if name.startswith("gated plain "):
            bodies[name] = one.step(one.gated(described(library, name.removeprefix("gated plain "))))
    return {"shape": vars(shape), "alone": blocks(bodies, rounds, 0.16), "late": int(library.late)}

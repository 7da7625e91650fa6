"""Time CUDA graphs against each other: interleaved, in random order, on a busy GPU."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from statistics import median, quantiles

import torch

Body = Callable[[], object]
SPIN_CYCLES = 300_000
"""Of the GPU, 0.2 ms: the host issues a short run meanwhile."""


def captured(body: Body, count: int) -> torch.cuda.CUDAGraph:
    """Return a graph of `count` calls. `body` has run before."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(count):
            body()
    return graph


def settle(graph: torch.cuda.CUDAGraph, seconds: float) -> None:
    """Replay until the clocks are those of steady load."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for _ in range(4):
            graph.replay()
        torch.cuda.synchronize()


def interleaved(bodies: Mapping[str, Body], rounds: int, count: int, settle_s: float = 0.15) -> dict[str, tuple[float, float]]:
    """Return the median and the interquartile range of the microseconds of one call, by name."""
    graphs = {}
    for name, body in bodies.items():
        body()
        graphs[name] = captured(body, count)
    settle(next(iter(graphs.values())), settle_s)
    marks = {name: [torch.cuda.Event(enable_timing=True) for _ in range(2)] for name in graphs}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    order = list(graphs)
    chance = random.Random(len(order))
    for number in range(rounds + 3):
        chance.shuffle(order)
        for name in order:
            marks[name][0].record()
            graphs[name].replay()
            marks[name][1].record()
        torch.cuda.synchronize()
        if number >= 3:
            for name, (begin, end) in marks.items():
                times[name].append(1e3 * begin.elapsed_time(end) / count)
    return {name: (median(values), _spread(values)) for name, values in times.items()}


def quick(body: Body, count: int) -> float:
    """Return the microseconds of one of `count` calls that are issued in a row, behind one that warms up."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    body()
    torch.cuda._sleep(SPIN_CYCLES)
    begin.record()
    for _ in range(count):
        body()
    end.record()
    end.synchronize()
    return 1e3 * begin.elapsed_time(end) / count


def quick_replay(body: Body, count: int) -> float:
    """Return the microseconds of one of `count` replays in a row, of a graph of one call."""
    body()
    return quick(captured(body, 1).replay, count)


def _spread(values: list[float]) -> float:
    low, _, high = quantiles(values, n=4)
    return high - low

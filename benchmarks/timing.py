"""Times of calls that all ranks make together: interleaved, started together, median over rounds, maximum over ranks."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from ub_overlap.tools.rank_process import World

Call = Callable[[], Any]


def graphed(call: Call, world: World, warm: int = 3) -> tuple[Call, Any]:
    """`call` as a CUDA graph: (replay, what the captured call returned, which every replay writes again)."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warm):
            call()
    torch.cuda.current_stream().wait_stream(side)
    world.sync()
    graph = torch.cuda.CUDAGraph()
    # thread_local: watchdog threads (NCCL's, ours) may look at their events meanwhile
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = call()
    return graph.replay, out


class Clock:
    """Milliseconds of one call. On CUDA: events around it, on ranks that leave a barrier kernel together."""

    def __init__(self, world: World, together: Call | None = None) -> None:
        """`together`: enqueues a barrier of all ranks on the current stream; by default an all_reduce of one element."""
        self.world = world
        token = torch.zeros(1, device=world.device)
        self.together = together or (lambda: dist.all_reduce(token))
        self.marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if world.cuda else []

    def once(self, call: Call) -> float:
        self.together()
        if not self.world.cuda:
            begin = time.perf_counter()
            call()
            return 1e3 * (time.perf_counter() - begin)
        begin, end = self.marks
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end)

    def rounds(self, calls: Mapping[str, Call], count: int, warm: int) -> tuple[dict[str, float], dict[str, float]]:
        """name -> (median ms, interquartile range ms), both the worst rank's. The calls take turns within a round."""
        taken: dict[str, list[float]] = {name: [] for name in calls}
        gc.collect()
        gc.disable()
        try:
            for turn in range(count + warm):
                for name, call in calls.items():
                    ms = self.once(call)
                    if turn >= warm:
                        taken[name].append(ms)
        finally:
            gc.enable()
        middles = self.world.worst([statistics.median(v) for v in taken.values()])
        spreads = self.world.worst([spread(v) for v in taken.values()])
        return dict(zip(calls, middles, strict=True)), dict(zip(calls, spreads, strict=True))

    def host(self, calls: Mapping[str, Call], count: int) -> dict[str, float]:
        """name -> microseconds until the call returns to Python, the device idle before; median, the worst rank's."""
        taken: dict[str, list[float]] = {name: [] for name in calls}
        gc.collect()
        gc.disable()
        try:
            for _ in range(count):
                for name, call in calls.items():
                    self.world.sync()
                    begin = time.perf_counter()
                    call()
                    taken[name].append(1e6 * (time.perf_counter() - begin))
            self.world.sync()
        finally:
            gc.enable()
        return dict(zip(calls, self.world.worst([statistics.median(v) for v in taken.values()]), strict=True))


def spread(values: list[float]) -> float:
    """Interquartile range."""
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4)
    return high - low


def settle(call: Call, world: World, seconds: float = 0.2) -> None:
    """Work of this rank alone until the clocks are where steady load puts them."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for _ in range(4):
            call()
        world.sync()

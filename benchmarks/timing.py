"""Time calls of all ranks: interleaved, started together, median over rounds, maximum over ranks."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ub_overlap.tools.rank_process import RankProcess, World

Call = Callable[[], Any]


@dataclass(frozen=True)
class Prepared:
    """A call with work that is issued before the clock starts. `count`: calls in a row; the time is that of one."""

    before: Call
    call: Call
    count: int = 1

    def __call__(self) -> None:
        for _ in range(self.count):
            self.call()


class Clock:
    """Times one call in milliseconds. On CUDA: between events, on ranks that leave a barrier kernel together."""

    def __init__(self, world: World, together: Call | None = None) -> None:
        """`together`: enqueue a barrier of all ranks on the current stream; default: an all_reduce of one element."""
        self.world = world
        token = torch.zeros(1, device=world.device)
        self.together = together or (lambda: dist.all_reduce(token))
        self.marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if world.cuda else []

    def time_call(self, call: Call) -> float:
        """Return the milliseconds of one call on this rank."""
        self.together()
        count = 1
        if isinstance(call, Prepared):
            call.before()
            count = call.count
        if not self.world.cuda:
            begin = time.perf_counter()
            call()
            return 1e3 * (time.perf_counter() - begin) / count
        begin, end = self.marks
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / count

    def rounds(self, calls: Mapping[str, Call], count: int, warm: int) -> tuple[dict[str, float], dict[str, float]]:
        """Return medians and interquartile ranges in ms by name, each of the slowest rank. Calls alternate within a round."""
        times: dict[str, list[float]] = {name: [] for name in calls}
        gc.collect()
        gc.disable()
        try:
            for round_number in range(count + warm):
                for name, call in calls.items():
                    ms = self.time_call(call)
                    if round_number >= warm:
                        times[name].append(ms)
        finally:
            gc.enable()
        middles = self.world.worst([statistics.median(v) for v in times.values()])
        spreads = self.world.worst([spread(v) for v in times.values()])
        return dict(zip(calls, middles, strict=True)), dict(zip(calls, spreads, strict=True))

    def host(self, calls: Mapping[str, Call], count: int) -> dict[str, float]:
        """Return microseconds by name until the call returns to Python, from an idle device; median of the slowest rank."""
        times: dict[str, list[float]] = {name: [] for name in calls}
        gc.collect()
        gc.disable()
        try:
            for _ in range(count):
                for name, call in calls.items():
                    self.world.sync()
                    begin = time.perf_counter()
                    call()
                    times[name].append(1e6 * (time.perf_counter() - begin))
            self.world.sync()
        finally:
            gc.enable()
        return dict(zip(calls, self.world.worst([statistics.median(v) for v in times.values()]), strict=True))


def spread(values: list[float]) -> float:
    """Return the interquartile range."""
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4)
    return high - low


def settle(call: Call, world: RankProcess, seconds: float = 0.2) -> None:
    """Run `call` until the clocks are at the level of steady load. Ranks call it different numbers of times."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for _ in range(4):
            call()
        world.sync()

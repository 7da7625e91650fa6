"""A benchmark of one process, without a group."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from ub_overlap.tools.rank_process import RankProcess, capture_graph


@dataclass
class OneProcess(RankProcess):
    """This process alone, for the metadata of a measurement."""

    device: torch.device
    rank: int = 0
    ranks: int = 1

    @classmethod
    def on_gpu(cls, name: str) -> OneProcess:
        """Return this process with its current GPU. Exits where there is none; `name`: of the benchmark."""
        if not torch.cuda.is_available():
            sys.exit(f"{name}: needs a GPU")
        return cls(torch.device("cuda", torch.cuda.current_device()))

    def gather(self, value: Any) -> list[Any]:
        """Return the value."""
        return [value]


def graph_us(body: Callable[[], Any], process: RankProcess, rounds: int = 15) -> float:
    """Return the median microseconds of `body` as a CUDA graph."""
    replay, _ = capture_graph(body, process, warm=1)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(rounds + 3):
        begin.record()
        replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * begin.elapsed_time(end))
    return median(times[3:])

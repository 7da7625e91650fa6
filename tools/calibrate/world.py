"""The ranks of a calibration: start, budget, progress, end; and the timing of calls."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ..rank_process import Deadline, World, exit_process, this_device
from .launch import ranks_of_torchrun

START_S = 180.0
PROBE_S = 60.0
"""A probe that takes longer ends the process."""


@dataclass
class CalibrationWorld(World):
    """The ranks, their start time, and the measurements that failed."""

    begun: float = field(default_factory=time.monotonic)
    holes: list[str] = field(default_factory=list)

    def spent(self) -> float:
        """Return the seconds since the start, the same on all ranks. Collective."""
        return self.worst([time.monotonic() - self.begun])[0]

    def probe(self, name: str, body: Callable[[], Any]) -> Any:
        """Return the result of `body` if it succeeds on all ranks; else None, and record a named hole. Collective."""
        with Deadline(f"calibration, {name}", PROBE_S):
            value, error = self.agreed(body)
        if error:
            self.holes.append(f"{name}: {error}")
            if self.rank == 0:
                print(f"calibrate: no {name}: {error}", file=sys.stderr, flush=True)
        return value


def start(kind: str | None = None) -> CalibrationWorld:
    """Join the ranks of torchrun. `kind`: "cuda" or "cpu". OptionError outside of torchrun, or with one rank."""
    rank, ranks = ranks_of_torchrun()
    with Deadline("start of calibration", START_S):
        world = CalibrationWorld.join(rank, ranks, this_device(kind, rank), control_s=120)
        world.group = world.new_group()
    return world


def end(world: CalibrationWorld, failure: Exception | None = None) -> None:
    """End all ranks together. On CUDA the process ends here, after it printed the `failure` of this rank."""
    with Deadline("end of calibration", PROBE_S):
        world.barrier()
        if world.cuda:
            if failure:
                print(f"calibrate: {failure}", file=sys.stderr, flush=True)
            exit_process(1 if failure else 0)
        dist.destroy_process_group()


class ProgressLine:
    """A progress bar on rank 0's stderr; where that is no terminal, a line per step and every few seconds of a long one."""

    WIDTH = 28
    LINES_EVERY_S = 5.0

    def __init__(self, world: CalibrationWorld, total: float) -> None:
        self.world, self.total, self.done, self.text, self.shown_at = world, total, 0.0, "", 0.0
        self.live = sys.stderr.isatty()

    def step(self, text: str, weight: float) -> None:
        """Report that `weight` more of the work is done. `text` describes that part."""
        self.done = min(self.total, self.done + weight)
        seconds = time.monotonic() - self.world.begun
        is_shown = text == self.text and seconds < self.shown_at + self.LINES_EVERY_S
        if self.world.rank or (not self.live and is_shown):
            return
        self.text, self.shown_at = text, seconds
        share = self.done / self.total
        bar = "#" * round(share * self.WIDTH)
        line = f"calibrate [{bar:<{self.WIDTH}}] {share:4.0%} {seconds:5.1f} s  {text}"
        print(f"\r{line:<79}" if self.live else line, end="" if self.live else "\n", file=sys.stderr, flush=True)

    def close(self) -> None:
        """End the line."""
        if self.live and self.world.rank == 0:
            print(file=sys.stderr, flush=True)


class Burst:
    """Times one call in a sequence of several, by this rank's clock.

    On CUDA the calls are enqueued after a matmul that runs longer than enqueueing takes. So the device is timed, not the host,
    at the clocks of steady load.
    """

    def __init__(self, world: World, together: Callable[[], Any] | None = None) -> None:
        """Allocate the load. `together`: enqueues a barrier of all ranks' devices."""
        self.world, self.together = world, together
        if world.cuda:
            self.left, self.right, self.out = (
                torch.randn(6144, 6144, device=world.device).to(torch.bfloat16) for _ in range(3)
            )
            self.marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def load(self, times: int = 1) -> None:
        """Enqueue `times` matmuls of about 0.6 ms each, on CUDA."""
        for _ in range(times if self.world.cuda else 0):
            torch.mm(self.left, self.right, out=self.out)

    def settle(self, seconds: float) -> None:
        """Load this rank's device until its clocks are steady."""
        until = time.monotonic() + seconds
        while self.world.cuda and time.monotonic() < until:
            self.load(8)
            self.world.sync()

    def once(self, call: Callable[[], Any], count: int, together: bool = False, ahead: int = 1) -> float:
        """Run one burst and return the microseconds per call. `ahead`: units of load before it."""
        if not self.world.cuda:
            begin = time.perf_counter()
            for _ in range(count):
                call()
            return 1e6 * (time.perf_counter() - begin) / count
        self.load(ahead)
        if together and self.together:
            self.together()
        begin, end = self.marks
        begin.record()
        for _ in range(count):
            call()
        end.record()
        torch.cuda.synchronize()
        return 1e3 * begin.elapsed_time(end) / count

    def us(
        self, call: Callable[[], Any], count: int = 8, rounds: int = 5, together: bool = False, warm: int = 1, ahead: int = 1
    ) -> float:
        """Return the median of `rounds` bursts after `warm` others.

        `together`: the ranks' devices start together (collective calls).
        """
        for _ in range(warm):
            self.once(call, count, together, ahead)
        if together and not self.world.cuda:
            self.world.barrier()
        return statistics.median(self.once(call, count, together, ahead) for _ in range(rounds))

"""The ranks that calibrate together: start, budget, progress, end; and how a call is timed."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ub_overlap.runtime.errors import OptionError

from ..rank_process import Deadline, World, leave, this_device

START_S = 180.0
PROBE_S = 60.0
"""A probe that takes longer ends the process."""


@dataclass
class Calibration(World):
    """The ranks, when they began, and what could not be measured."""

    begun: float = field(default_factory=time.monotonic)
    holes: list[str] = field(default_factory=list)

    def spent(self) -> float:
        """Seconds since the begin, the same on all ranks. Collective."""
        return self.worst([time.monotonic() - self.begun])[0]

    def probe(self, name: str, body: Callable[[], Any]) -> Any:
        """What `body` returns if it works on all ranks; else None, and a named hole. Collective."""
        with Deadline(f"calibration, {name}", PROBE_S):
            value, error = self.agreed(body)
        if error:
            self.holes.append(f"{name}: {error}")
            if self.rank == 0:
                print(f"calibrate: no {name}: {error}", file=sys.stderr, flush=True)
        return value


def start(kind: str | None = None) -> Calibration:
    """Join the ranks of torchrun. `kind`: "cuda" or "cpu". OptionError outside of torchrun, or with one rank."""
    ranks = int(os.environ.get("WORLD_SIZE", "0"))
    if "RANK" not in os.environ or ranks < 2:
        raise OptionError(
            "calibration needs the ranks of a group",
            got=f"{ranks or 1} rank",
            expected="2 or more",
            fix="torchrun --nproc-per-node N -m ub_overlap calibrate",
        )
    rank = int(os.environ["RANK"])
    with Deadline("start of calibration", START_S):
        here = Calibration.join(rank, ranks, this_device(kind, rank), control_s=120)
        here.group = here.new_group()
    return here


def end(world: Calibration) -> None:
    """Leave together. On CUDA the process ends here."""
    with Deadline("end of calibration", PROBE_S):
        world.barrier()
        if world.cuda:
            leave(0)
        dist.destroy_process_group()


class ProgressLine:
    """A bar on rank 0's stderr; a line a step where that is no terminal."""

    WIDTH = 28

    def __init__(self, world: Calibration, total: float) -> None:
        self.world, self.total, self.done, self.text = world, total, 0.0, ""
        self.live = sys.stderr.isatty()

    def step(self, text: str, weight: float) -> None:
        """`weight` of the work is done, and `text` is what it was."""
        self.done = min(self.total, self.done + weight)
        if self.world.rank or (not self.live and text == self.text):
            return
        self.text = text
        share = self.done / self.total
        bar = "#" * round(share * self.WIDTH)
        seconds = time.monotonic() - self.world.begun
        line = f"calibrate [{bar:<{self.WIDTH}}] {share:4.0%} {seconds:5.1f} s  {text}"
        print(f"\r{line:<79}" if self.live else line, end="" if self.live else "\n", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.live and self.world.rank == 0:
            print(file=sys.stderr, flush=True)


class Burst:
    """Microseconds of one call out of several in a row, by this rank's clock.

    On CUDA the calls are enqueued behind a matmul that runs longer than enqueueing takes, so that the device and not the host
    is timed, at the clocks of steady load.
    """

    def __init__(self, world: World, together: Callable[[], Any] | None = None) -> None:
        """`together`: enqueues a barrier of all ranks' devices."""
        self.world, self.together = world, together
        if world.cuda:
            self.left, self.right, self.out = (
                torch.randn(6144, 6144, device=world.device).to(torch.bfloat16) for _ in range(3)
            )
            self.marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def load(self, times: int = 1) -> None:
        """Enqueue work of about 0.6 ms each, on CUDA."""
        for _ in range(times if self.world.cuda else 0):
            torch.mm(self.left, self.right, out=self.out)

    def settle(self, seconds: float) -> None:
        """Load of this rank alone until the clocks are where it puts them."""
        until = time.monotonic() + seconds
        while self.world.cuda and time.monotonic() < until:
            self.load(8)
            self.world.sync()

    def once(self, call: Callable[[], Any], count: int, together: bool = False, ahead: int = 1) -> float:
        """One burst: microseconds of each of `count` calls. `ahead`: units of load in front."""
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
        """The median of `rounds` bursts after `warm` others. `together`: the ranks' devices begin together (collective
        calls)."""
        for _ in range(warm):
            self.once(call, count, together, ahead)
        if together and not self.world.cuda:
            self.world.barrier()
        return statistics.median(self.once(call, count, together, ahead) for _ in range(rounds))

"""The soak: random calls, or training steps of a program, on CPU ranks until a number of seconds or calls is reached.

Results equal fp64 as closely as the plain op's, and memory, descriptors, mappings and threads of all ranks stay flat.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.harness.ranks import RankPool
from tests.harness.shared_memory import list_segments

from .rank_programs import run_steps
from .rank_soak import run_batch
from .resources import MIN_SAMPLES, Resources, find_leaks

BATCH = 25
"""Calls, or steps, between two samples of the resources."""
BATCHES = {"recovery": 2}
"""The same for programs whose steps are long."""


@dataclass
class SoakReport:
    """The result of a soak. `bad`: "rank, error" texts with the number of the call. `samples`: resources by rank.

    `program`: whose steps were the calls, "" for random calls.
    """

    ranks: int
    seed: int
    program: str = ""
    calls: int = 0
    seconds: float = 0.0
    bad: list[tuple[int, int, str]] = field(default_factory=list)
    samples: list[list[Resources]] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)

    @property
    def is_fine(self) -> bool:
        return not self.bad and not self.leaks

    def describe(self) -> str:
        """Return the result in lines. Each wrong call comes with the command that replays it."""
        what = f"steps of {self.program}" if self.program else "calls"
        lines = [f"{self.calls} {what} on {self.ranks} ranks in {self.seconds:.0f} s, seed {self.seed}: {len(self.bad)} wrong"]
        command = f"python -m tests.soak {f'programs --only {self.program!r}' if self.program else 'calls'}"
        for number, rank, text in self.bad:
            lines.append(f"  rank {rank}: {text}")
            lines.append(f"    replay: {command} --ranks {self.ranks} --seed {self.seed} --first {number} -n 1")
        for rank, samples in enumerate(self.samples):
            if samples:
                a, b = samples[0], samples[-1]
                lines.append(
                    f"  rank {rank}: resident {a.rss >> 20} to {b.rss >> 20} MiB, descriptors {a.fds} to {b.fds}, "
                    f"mappings {a.maps} to {b.maps}, threads {a.threads} to {b.threads}"
                )
                if len(samples) < MIN_SAMPLES:
                    lines.append(f"  rank {rank}: {len(samples)} samples show no leak; it takes {MIN_SAMPLES}")
        return "\n".join([*lines, *(f"  LEAK {leak}" for leak in self.leaks)])


def soak(
    ranks: int,
    seed: int,
    *,
    program: str = "",
    seconds: float | None = None,
    calls: int | None = None,
    first: int = 0,
    sabotage: int = -1,
    least_samples: int = 0,
    limit_s: float = float("inf"),
    progress: Callable[[str], None] = lambda text: None,
) -> SoakReport:
    """Run random calls until `seconds` or `calls` are over, or an op raises. `first`: the number of the first call.

    `program`: run steps of that program (steps.py) instead.
    `least_samples`: a slow machine goes on behind `seconds` until it has so many samples of the resources and nothing seems to
    grow, or to `limit_s`: a leak goes on, a warm-up ends.
    """
    report = SoakReport(ranks, seed, program, samples=[[] for _ in range(ranks)])
    begin = time.monotonic()
    before = list_segments()

    def is_time_left() -> bool:
        passed = time.monotonic() - begin
        if seconds is None or passed < seconds:
            return True
        is_open = len(report.samples[0]) < least_samples or (least_samples > 0 and any(map(find_leaks, report.samples)))
        return is_open and passed < limit_s

    batch, job = BATCHES.get(program, BATCH), (run_steps, program) if program else (run_batch,)
    with RankPool(ranks) as pool:
        while (calls is None or report.calls < calls) and is_time_left():
            count = batch if calls is None else min(batch, calls - report.calls)
            args = (seed, first + report.calls, count, sabotage)
            results = pool.run(*job, *args, timeout=180 + 2 * count, keep_graphs=True)  # the first step may compile
            report.calls += count
            for rank, result in enumerate(results):
                report.bad += [(number, rank, text) for number, text in result["bad"]]
                report.samples[rank].append(result["resources"])
            progress(f"{report.calls} calls, {time.monotonic() - begin:.0f} s, {len(report.bad)} wrong")
            if any(result["broken"] for result in results):
                break
        report.seconds = time.monotonic() - begin
    report.leaks = [f"rank {rank}: {leak}" for rank, samples in enumerate(report.samples) for leak in find_leaks(samples)]
    left = sorted(list_segments() - before)
    report.leaks += [f"{name} is left open" for name in left]
    return report

"""Measured times of sites: the steps of their last call, as the runtime traces them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from ub_overlap.runtime import settings
from ub_overlap.runtime.extension import extension


@dataclass(frozen=True, slots=True)
class StepTime:
    """One step of a call, in microseconds on a clock that all steps of a run share."""

    queue: str
    text: str
    begin_us: float
    end_us: float


@dataclass(frozen=True, slots=True)
class Measured:
    """The measured time of a site. `us`: median over the runs, from first to last step. `steps`: those of the last run."""

    us: float
    steps: tuple[StepTime, ...]


def last_call_steps(site: str) -> tuple[StepTime, ...]:
    """Return the steps of the last traced call of a site ("<plan digest>/<site id>"); () without one."""
    rows = extension().last_trace(site)
    return tuple(StepTime(queue, f"{kind} {step}", begin / 1e3, end / 1e3) for step, queue, kind, begin, end, _ in rows)


def measure_sites(run: Callable[[], Any], sites: Sequence[str], repeats: int = 3) -> dict[str, Measured]:
    """Call `run` `repeats` times with tracing. Return the times of the sites that ran. All ranks must call it together."""
    before = settings.current().trace
    traced: dict[str, list[tuple[StepTime, ...]]] = {}
    settings.configure(trace=True)
    try:
        for _ in range(repeats):
            run()
            for site in sites:
                if steps := last_call_steps(site):
                    traced.setdefault(site, []).append(steps)
    finally:
        settings.configure(trace=before)
    return {site: Measured(median(map(_span, calls)), calls[-1]) for site, calls in traced.items()}


def _span(steps: tuple[StepTime, ...]) -> float:
    return max(s.end_us for s in steps) - min(s.begin_us for s in steps)

"""Times of alternatives: rounds that run each in turn on every rank, and the choice from the times of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

MARGIN = 0.02
"""Relative time that another alternative must save to replace the first. Smaller differences are noise."""


def median_us(count: int, run: Callable[[int], float], *, warm: int, timed: int) -> list[float]:
    """Return the median microseconds of `count` alternatives on this rank. `run(i)`: run alternative i and return its time.

    Each round runs every alternative once, so that clocks and heat are the same for all. `warm` rounds do not count.
    """
    times: list[list[float]] = [[] for _ in range(count)]
    for turn in range(warm + timed):
        for index in range(count):
            us = run(index)
            if turn >= warm:
                times[index].append(us)
    return [round(median(row), 3) for row in times]


def fastest(slowest: Sequence[float]) -> int:
    """Return the index of the least time, 0 where it saves less than the margin. `slowest`: times of the slowest ranks."""
    best = min(range(len(slowest)), key=slowest.__getitem__)
    return best if slowest[best] < (1 - MARGIN) * slowest[0] else 0

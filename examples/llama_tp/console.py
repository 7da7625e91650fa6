"""Console output of the demo: a progress bar and an ASCII plot of two curves."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import TextIO


class ProgressBar:
    """A one-line progress bar. On a terminal it redraws in place; in a log it prints one line per tenth.

    `total`: the number of steps. Each `update` counts one step and sets the text next to the bar.
    """

    WIDTH = 30

    def __init__(self, total: int, *, stream: TextIO | None = None, enabled: bool = True) -> None:
        self.total, self.done, self.enabled = total, 0, enabled
        self.stream = stream or sys.stdout
        self.live = self.stream.isatty()

    def update(self, note: str) -> None:
        """Count one step and redraw."""
        before, self.done = self.done, self.done + 1
        if not self.enabled:
            return
        filled = self.WIDTH * self.done // self.total
        line = f"  [{'#' * filled}{'.' * (self.WIDTH - filled)}] {self.done:>{len(str(self.total))}}/{self.total}  {note}"
        if self.live:
            self.stream.write(f"\r{line}\x1b[K" + ("\n" if self.done == self.total else ""))
        elif 10 * self.done // self.total > 10 * before // self.total:
            self.stream.write(line + "\n")
        self.stream.flush()


def plot(first: Sequence[float], second: Sequence[float], *, marks: str = "eu*", width: int = 64, height: int = 12) -> str:
    """Return a plot of two curves of equal length. `marks`: characters of the first, of the second, and of both in one cell.

    Raises:
        ValueError: a value is not finite, or the curves are empty or of different lengths.
    """
    values = [*first, *second]
    if not values or len(first) != len(second) or not all(map(math.isfinite, values)):
        raise ValueError(f"cannot plot curves of {len(first)} and {len(second)} values, {values[:4]} ...")
    low, high = min(values), max(values)
    width = min(width, max(len(first), 2))
    grid = [[" "] * width for _ in range(height)]

    def cell(step: int, value: float) -> tuple[int, int]:
        row = round((high - value) / (high - low) * (height - 1)) if high > low else 0
        return row, step * (width - 1) // max(len(first) - 1, 1)

    for step, value in enumerate(first):
        row, column = cell(step, value)
        grid[row][column] = marks[0]
    for step, value in enumerate(second):
        row, column = cell(step, value)
        grid[row][column] = marks[2] if grid[row][column] in (marks[0], marks[2]) else marks[1]
    labels = [f"{high:8.4f}", *[" " * 8] * (height - 2), f"{low:8.4f}"]
    lines = [f"{label} |{''.join(cells)}" for label, cells in zip(labels, grid, strict=True)]
    return "\n".join([*lines, " " * 9 + "+" + "-" * width, " " * 10 + f"step 1 .. {len(first)}"])

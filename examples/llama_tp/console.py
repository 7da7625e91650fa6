"""Console output of the demo: lines of a limited width, and an ASCII plot of two curves."""

from __future__ import annotations

import logging
import math
import textwrap
from collections.abc import Sequence

WIDTH = 100
"""The longest line that the demo prints; paths may be longer."""


def wrap(text: str) -> str:
    """Return `text` with its lines wrapped at WIDTH. Words, e.g. paths, are not cut."""
    return "\n".join(
        textwrap.fill(line, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        for line in text.splitlines()
    )


class WrappedLines(logging.Formatter):
    """Formats log records as plain lines of at most WIDTH columns."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the message, wrapped."""
        return wrap(super().format(record))


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

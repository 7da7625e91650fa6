"""Times measured at some sizes, and interpolation between them."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping

Curve = tuple[tuple[float, float], ...]
"""(bytes, microseconds), by rising bytes; both rise."""


def at(curve: Curve, size: float) -> float:
    """Return the microseconds for `size` bytes: linear between points, and extrapolated from the last two beyond them.

    Below the first point the time falls with the slope after it, to half of its time at least: an empty transfer was not
    measured.
    """
    if len(curve) == 1:
        known, us = curve[0]
        return us * max(size / known, 0.5)
    place = min(max(bisect_left(curve, (size,)), 1), len(curve) - 1)
    (x0, y0), (x1, y1) = curve[place - 1], curve[place]
    value = y0 + (y1 - y0) * (size - x0) / (x1 - x0)
    return max(value, curve[0][1] / 2)


def between(curves: Mapping[int, Curve], ranks: int, size: float) -> float | None:
    """Return the microseconds for `size` bytes in a group of `ranks`, interpolated by the logarithm of ranks.

    Beyond the measured group sizes the nearest one is used. None where nothing was measured.
    """
    below = max((r for r in curves if r <= ranks), default=0)
    above = min((r for r in curves if r >= ranks), default=0)
    if not below or not above:
        return at(curves[below or above], size) if below or above else None
    low = at(curves[below], size)
    if below == above:
        return low
    return low + (at(curves[above], size) - low) * math.log(ranks / below) / math.log(above / below)

"""Time of a collective of few tokens with what follows it: as one kernel, and plain (fused_curves.py).

Group sizes that were not measured are assumed from the nearest measured one. One kernel takes the time of that group for as
many sent bytes of a rank. The plain form takes its time for the same tensor, and what the plain collectives of both group
sizes differ by.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..plan.strategy import FUSED, NONE, Mode, Strategy
from .curve import Curve, at
from .fused_curves import WITH_NORM
from .profile import Profile
from .site_shape import SiteShape

FEW_BYTES = 1 << 20
"""A tensor of few tokens. Of larger ones the links' bandwidth decides, so their differences say nothing about small ones."""


def strategies_of(collective: str) -> tuple[Strategy, ...]:
    """Return the strategies that run `collective` as one kernel."""
    return tuple(map(Strategy, FUSED if collective == "all_reduce" else FUSED[:1]))


def fused_us(profile: Profile, shape: SiteShape, strategy: Strategy, size: float | None = None) -> float | None:
    """Return the microseconds of a site of `size` bytes (None: its own); None where it was not measured."""
    measured = measured_ranks(profile, shape)
    curve = _curve(profile, shape, strategy, measured)
    if curve is None:
        return None
    size = shape.whole_bytes if size is None else size
    if strategy == NONE:
        return at(curve, size) + _slower_plain_us(profile, shape.collective, measured, shape.ranks, size)
    return at(curve, size * _sent(strategy, shape.collective, shape.ranks) / _sent(strategy, shape.collective, measured))


def measured_ranks(profile: Profile, shape: SiteShape) -> int:
    """Return the measured group size that is nearest to that of the site; 0 without any."""
    known = profile.fused.curves.get(shape.collective, {}) if profile.fused else {}
    return min(known, key=lambda ranks: (abs(ranks - shape.ranks), ranks), default=0)


def neighbor_sizes(profile: Profile, shape: SiteShape) -> tuple[float, ...]:
    """Return the measured sizes of the plain form around that of the site, one of them below the first; none above the last."""
    curve = _curve(profile, shape, NONE, measured_ranks(profile, shape))
    sizes = [size for size, _ in curve] if curve else []
    above = next((i for i, size in enumerate(sizes) if size >= shape.whole_bytes), None)
    if above is None:
        return ()
    return tuple(sizes[above - (above > 0 and sizes[above] > shape.whole_bytes) : above + 1])


def _curve(profile: Profile, shape: SiteShape, strategy: Strategy, ranks: int) -> Curve | None:
    form = str(strategy) + (WITH_NORM if shape.has_norm else "")
    return profile.fused.curves[shape.collective][ranks].get(form) if profile.fused and ranks else None


def _sent(strategy: Strategy, collective: str, ranks: int) -> float:
    """Return the bytes that a rank sends for each byte of the whole tensor."""
    if strategy.mode is Mode.TWO_SHOT:
        return 2 * (ranks - 1) / ranks
    return float(ranks - 1) if collective == "all_reduce" else (ranks - 1) / ranks


def _slower_plain_us(profile: Profile, collective: str, measured: int, ranks: int, size: float) -> float:
    """Return what the plain collective of `ranks` is taken to be slower than that of `measured` ranks.

    A group takes at least as long as a smaller one. So the largest group counts that was measured at `size`. Below all
    measured sizes the difference at the smallest one stays, where that is a size of few tokens; else nothing is known, and 0.
    """
    curves = profile.collectives.get(collective, {})
    groups = sorted((count for count in curves if measured < count <= ranks and measured in curves), reverse=True)
    ranges = {count: _common_sizes(curves, collective, count, measured) for count in groups}

    def difference(count: int, size: float) -> float:
        us, base_us = (at(curves[c], size * _sent_by_plain(collective, c)) for c in (count, measured))
        return max(0.0, us - base_us)

    for count, (least, most) in ranges.items():
        if least <= size <= most:
            return difference(count, size)
    common = [(round(least), -count) for count, (least, most) in ranges.items() if least <= most]
    least, largest = min(common, default=(math.inf, 0))
    return difference(-largest, least) if size < least <= FEW_BYTES else 0.0


def _common_sizes(curves: Mapping[int, Curve], collective: str, *counts: int) -> tuple[float, float]:
    """Return the smallest and the largest tensor that plain collectives of all these group sizes were measured for."""
    ends = [[curves[c][i][0] / _sent_by_plain(collective, c) for c in counts] for i in (0, -1)]
    return max(ends[0]), min(ends[1])


def _sent_by_plain(collective: str, ranks: int) -> float:
    return (ranks - 1) / ranks * (2 if collective == "all_reduce" else 1)

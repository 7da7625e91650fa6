"""Time of a collective of few tokens with what follows it: as one kernel, and plain (fused_curves.py).

Group sizes that were not measured are assumed from the nearest measured one. One kernel takes the time of that group for as
many sent bytes of a rank. The plain form takes its time for the same tensor, and what the plain collectives of both group
sizes are measured to differ by.
"""

from __future__ import annotations

from ..plan.strategy import FUSED, NONE, Mode, Strategy
from .curve import Curve, at
from .fused_curves import WITH_NORM
from .profile import Profile
from .site_shape import SiteShape


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
    """Return what the plain collective of `ranks` takes longer than that of `measured` ranks; 0 outside of their curves."""
    us = []
    for count in (ranks, measured):
        curve = profile.collectives.get(collective, {}).get(count)
        sent = size * (count - 1) / count * (2 if collective == "all_reduce" else 1)
        if curve is None or not curve[0][0] <= sent <= curve[-1][0]:
            return 0.0
        us.append(at(curve, sent))
    return max(0.0, us[0] - us[1])

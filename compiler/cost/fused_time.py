"""Time of a collective of few tokens with what follows it: as one kernel, and plain.

    one_shot, two_shot      one kernel
    none                    the plain collective, then residual and norm as one kernel of Inductor

All are curves by the bytes of the collective's whole tensor, measured alike: sequences of calls in a CUDA graph. So their
difference is what a decode step saves.

Group sizes that were not measured are assumed from the nearest measured one. One kernel takes the time of that group for as
many sent bytes of a rank. The plain form takes its time for the same tensor, and what the plain collectives of both group
sizes are measured to differ by.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..plan.strategy import FUSED, NONE, Mode, Strategy
from .curve import Curve, at

if TYPE_CHECKING:
    from .profile import Profile
    from .site_shape import SiteShape

WITH_NORM = " + norm"
FORMS = tuple(str(s) + norm for s in (NONE, *map(Strategy, FUSED)) for norm in ("", WITH_NORM))
"""Names of the measured forms: "one_shot", "one_shot + norm" with residual and RMSNorm."""


@dataclass(frozen=True, slots=True)
class FusedTimes:
    """Measured curves by collective, ranks and form. `source`: the command and the date."""

    source: str
    curves: Mapping[str, Mapping[int, Mapping[str, Curve]]]


def without_peaks(points: Mapping[int, float]) -> list[tuple[float, float]]:
    """Return [(bytes, microseconds)] in which no size takes longer than a larger one.

    Small calls take a few microseconds each, and noise only adds time.
    """
    found: list[tuple[float, float]] = []
    for size in sorted(points, reverse=True):
        found.insert(0, (float(size), min(points[size], found[0][1]) if found else points[size]))
    return found


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


def plain_fused(times: FusedTimes) -> dict[str, Any]:
    """Return the times as JSON values."""
    return {
        "source": times.source,
        **{
            kind: {
                str(ranks): {form: [[float(size), float(us)] for size, us in curve] for form, curve in forms.items()}
                for ranks, forms in by_ranks.items()
            }
            for kind, by_ranks in times.curves.items()
        },
    }

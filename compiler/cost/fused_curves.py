"""Measured times of collectives of few tokens, as a profile has them.

    one_shot, two_shot      one kernel
    none                    the plain collective, then residual and norm as one kernel of Inductor

All are curves by the bytes of the collective's whole tensor, measured alike: sequences of calls in a CUDA graph. So their
difference is what a decode step saves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..plan.strategy import FUSED, NONE, Strategy
from .curve import Curve

WITH_NORM = " + norm"
FUSED_KINDS = ("all_reduce", "reduce_scatter", "all_gather")
"""The collectives that have fused forms."""
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

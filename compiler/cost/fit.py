"""What is left of whole calls when their parts are taken off: the cost of beginning and ending one."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..plan import Strategy
from .predict import predict
from .profile import Profile
from .shape import SiteShape


def shape_of(check: Mapping[str, Any]) -> SiteShape:
    """The site of a timed call {"kind", "ranks", "dtype", "M", "N", "K"}, with one rank's matmul [M, K] @ [K, N]."""
    m, n, k = check["M"], check["N"], check["K"]
    cols = k if check["kind"] == "all_gather_matmul" else n
    return SiteShape(check["kind"], check["ranks"], check["dtype"], ((m, n, k, False),), m, cols)


def fit(profile: Profile, checks: Sequence[Mapping[str, Any]]) -> Profile:
    """`profile` with begin and end such that half of the timed calls take more and half less than predicted."""
    if not checks:
        return profile
    bare = replace(profile, steps=replace(profile.steps, begin_us=0.0, end_us=0.0))
    left = statistics.median(c["us"] - predict(shape_of(c), Strategy.parse(c["strategy"]), bare).us for c in checks)
    half = float(f"{max(0.0, left) / 2:.4g}")
    return replace(profile, steps=replace(profile.steps, begin_us=half, end_us=half))


def errors(profile: Profile, checks: Sequence[Mapping[str, Any]]) -> list[tuple[str, float, float]]:
    """(call in words, predicted us, measured us)."""
    return [
        (
            f"{check['kind']} {check['M']}x{check['N']}x{check['K']} {check['strategy']}",
            predict(shape_of(check), Strategy.parse(check["strategy"]), profile).us,
            check["us"],
        )
        for check in checks
    ]

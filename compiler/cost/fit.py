"""What is left of whole calls when their parts are taken off: the cost of beginning and ending one."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..plan import Strategy
from .matmul import analytic_us
from .predict import predict
from .profile import Profile
from .shape import SiteShape


def shape_of(check: Mapping[str, Any]) -> SiteShape:
    """The site of a timed call {"kind", "ranks", "dtype", "M", "N", "K"}, with one rank's matmul [M, K] @ [K, N]."""
    m, n, k = check["M"], check["N"], check["K"]
    cols = k if check["kind"] == "all_gather_matmul" else n
    return SiteShape(check["kind"], check["ranks"], check["dtype"], ((m, n, k, False),), m, cols)


def fit(profile: Profile, checks: Sequence[Mapping[str, Any]]) -> Profile:
    """`profile` with rates such that half of its matmuls, and with begin and end such that half of the timed calls, take more
    than predicted and half less."""
    profile = rates(profile)
    if not checks:
        return profile
    bare = replace(profile, steps=replace(profile.steps, begin_us=0.0, end_us=0.0))
    short = sorted(checks, key=lambda c: c["us"])[: len(checks) // 2 + 1]  # of long ones the matmul's own error is most
    left = statistics.median(c["us"] - predict(shape_of(c), Strategy.parse(c["strategy"]), bare).us for c in short)
    half = float(f"{max(0.0, left) / 2:.4g}")
    return replace(profile, steps=replace(profile.steps, begin_us=half, end_us=half))


def rates(profile: Profile) -> Profile:
    """`profile` with the analytic model's rate of every dtype set by the measured matmuls that are long enough to show it."""
    tflops = dict(profile.compute.tflops)
    for dtype in sorted({row[1] for row in profile.matmuls}):
        mine = [row for row in profile.matmuls if row[1] == dtype]
        longest = sorted(mine, key=lambda row: row[5])[len(mine) // 3 :]
        for _ in range(3):  # launches and memory are no part of the rate, so one step does not get there
            now = replace(profile, compute=replace(profile.compute, tflops=dict(tflops)))
            off = statistics.median(us / analytic_us(now, dtype, layout, m, n, k) for layout, _, m, n, k, us in longest)
            tflops[dtype] = float(f"{tflops[dtype] / off:.4g}")
    return replace(profile, compute=replace(profile.compute, tflops=tflops))


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

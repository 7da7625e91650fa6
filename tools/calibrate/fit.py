"""What is left of whole calls when their parts are taken off: the cost of beginning and ending one, and of its small steps."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

from ub_overlap.compiler.cost.matmul_time import analytic_us
from ub_overlap.compiler.cost.predict import predict
from ub_overlap.compiler.cost.profile import Profile
from ub_overlap.compiler.cost.site_shape import SiteShape
from ub_overlap.compiler.plan.strategy import Strategy

SMALL = ("wait_us", "arrive_us", "signal_us", "flag_us", "event_us")
"""Steps that are measured alone, in rows of their like; within a call they overlap more, or less."""


def shape_of(kind: str, ranks: int, dtype: str, m: int, n: int, k: int) -> SiteShape:
    """The site of a timed call of `ranks` with one rank's matmul [m, k] @ [k, n]."""
    return SiteShape(kind, ranks, dtype, ((m, n, k, False),), m, k if kind == "all_gather_matmul" else n)


def fit(profile: Profile) -> Profile:
    """`profile` with rates such that half of its matmuls take more than predicted and half less, and with those costs of
    beginning, ending and of small steps that predict its whole calls best: in the mean over calls of |log(predicted /
    measured)|, which no single call that was disturbed can sway far."""
    profile = rates(profile)
    if not profile.checks:
        return profile
    best, least, at = profile, math.inf, (4.0, 1.0)
    # Coarse, then fine: the error is flat around its least value and has one.
    width = 4.0
    for _ in range(4):
        fixed, scale = at
        for half in sorted({max(0.0, fixed + width * i / 2) for i in range(-2, 3)}):
            for factor in sorted({max(0.25, scale + width * i / 16) for i in range(-2, 3)}):
                tried = with_steps(profile, half, factor)
                error = statistics.fmean(abs(math.log(p / us)) for _, p, us in errors(tried))
                if error < least - 1e-9:
                    best, least, at = tried, error, (half, factor)
        width /= 2
    return best


def with_steps(profile: Profile, half: float, factor: float) -> Profile:
    small = {name: float(f"{getattr(profile.steps, name) * factor:.4g}") for name in SMALL}
    half = float(f"{half:.4g}")
    return replace(profile, steps=replace(profile.steps, begin_us=half, end_us=half, **small))


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


def errors(profile: Profile) -> list[tuple[str, float, float]]:
    """(call in words, predicted us, measured us) of its whole calls."""
    return [
        (f"{kind} {m}x{n}x{k} {how}", predict(shape_of(kind, ranks, dtype, m, n, k), Strategy.parse(how), profile).us, us)
        for kind, ranks, dtype, m, n, k, how, us in profile.checks
    ]

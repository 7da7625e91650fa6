"""Fit the costs that only whole calls show: beginning and ending a call, and its small steps within a call."""

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
"""Steps that are measured in isolation, several in a row; within a call they overlap more, or less."""


def shape_of(kind: str, ranks: int, dtype: str, m: int, n: int, k: int) -> SiteShape:
    """Return the site of a timed call of `ranks` with one rank's matmul [m, k] @ [k, n]."""
    return SiteShape(kind, ranks, dtype, ((m, n, k, False),), m, k if kind == "all_gather_matmul" else n)


def fit(profile: Profile) -> Profile:
    """Return `profile` with fitted rates and step costs.

    Rates: half of the matmuls take more than predicted, half less. Costs of beginning, ending and small steps: those that
    predict whole calls best, by the mean over calls of |log(predicted / measured)|. One disturbed call cannot shift that far.
    """
    profile = fit_rates(profile)
    if not profile.checks:
        return profile
    # A half of what calls take beyond their parts: some us on GPUs, where the search starts at 4, hundreds on CPU ranks.
    beyond = statistics.median(us - p for _, p, us in compare_calls(with_steps(profile, 0.0, 1.0))) / 2
    start = beyond if beyond > 8.0 else 4.0
    best, least, at = profile, math.inf, (start, 1.0)
    # Coarse, then fine: the error has one minimum and is flat around it.
    width = 4.0
    for _ in range(4):
        fixed, scale = at
        for half in sorted({max(0.0, fixed + start / 4.0 * width * i / 2) for i in range(-2, 3)}):
            for factor in sorted({max(0.25, scale + width * i / 16) for i in range(-2, 3)}):
                candidate = with_steps(profile, half, factor)
                error = statistics.fmean(abs(math.log(p / us)) for _, p, us in compare_calls(candidate))
                if error < least - 1e-9:
                    best, least, at = candidate, error, (half, factor)
        width /= 2
    return best


def with_steps(profile: Profile, half: float, factor: float) -> Profile:
    """Return `profile` with `half` us for beginning and for ending a call, and small steps scaled by `factor`."""
    small = {name: float(f"{getattr(profile.steps, name) * factor:.4g}") for name in SMALL}
    half = float(f"{half:.4g}")
    return replace(profile, steps=replace(profile.steps, begin_us=half, end_us=half, **small))


def fit_rates(profile: Profile) -> Profile:
    """Return `profile` with the analytic rate of every dtype fitted to its longer measured matmuls."""
    tflops = dict(profile.compute.tflops)
    for dtype in sorted({row[1] for row in profile.matmuls}):
        rows = [row for row in profile.matmuls if row[1] == dtype]
        longest = sorted(rows, key=lambda row: row[5])[len(rows) // 3 :]
        for _ in range(3):  # the time also has launches and memory traffic, so one step does not converge
            now = replace(profile, compute=replace(profile.compute, tflops=dict(tflops)))
            off = statistics.median(us / analytic_us(now, dtype, layout, m, n, k) for layout, _, m, n, k, us in longest)
            tflops[dtype] = float(f"{tflops[dtype] / off:.4g}")
    return replace(profile, compute=replace(profile.compute, tflops=tflops))


def median_error(profile: Profile) -> float | None:
    """Return the median of |predicted / measured - 1| over the profile's whole calls; None without any."""
    errors = [abs(p / us - 1) for _, p, us in compare_calls(profile)]
    return statistics.median(errors) if errors else None


def compare_calls(profile: Profile) -> list[tuple[str, float, float]]:
    """Return (call in words, predicted us, measured us) of the profile's whole calls."""
    return [
        (f"{kind} {m}x{n}x{k} {how}", predict(shape_of(kind, ranks, dtype, m, n, k), Strategy.parse(how), profile).us, us)
        for kind, ranks, dtype, m, n, k, how, us in profile.checks
    ]

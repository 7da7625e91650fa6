"""(shape, profile) -> whether a collective of few tokens is one kernel with what follows it, and by which strategy.

A strategy is chosen where it is measured to be faster at both measured sizes around that of the site. Beyond the largest
measured size none is.
"""

from __future__ import annotations

from ..plan.strategy import NONE, Strategy
from .choice import StrategyChoice
from .fused_time import fused_us, measured_ranks, neighbor_sizes, strategies_of
from .predict import Prediction, predict
from .profile import Profile
from .site_shape import SiteShape

MARGIN_US, MARGIN = 1.0, 0.05
"""The saving required: the spread of measured times, in microseconds and as a share. Twice that where times are assumed."""


def choose_fused(shape: SiteShape, profile: Profile, in_op: bool = False) -> StrategyChoice | None:
    """Return the choice for a site of kind "fused_..."; None where its size or its form was not measured.

    `in_op`: the plain form is a row of the op's table. Then eager kernels compute residual and norm.
    """
    sizes = neighbor_sizes(profile, shape)
    timed = [s for s in strategies_of(shape.collective) if fused_us(profile, shape, s) is not None]
    if not sizes or not timed or fused_us(profile, shape, NONE) is None:
        return None
    predictions = {str(s): predict(shape, s, profile) for s in (NONE, *timed)}
    more_us = unfused_us(shape, profile) if in_op else 0.0
    best, best_us = NONE, predictions[str(NONE)].us + more_us
    plain_us = best_us
    for strategy in timed:
        us = predictions[str(strategy)].us
        if best_us - us > _margin_us(profile, shape, best_us) and _is_faster_at(sizes, profile, shape, strategy, more_us):
            best, best_us = strategy, us
    return StrategyChoice(best, predictions, _reason(predictions, best, shape, profile), plain_us - best_us, (NONE, *timed))


def unfused_us(shape: SiteShape, profile: Profile) -> float:
    """Return what residual and norm take longer as eager kernels: each of two more reads and writes the tensor."""
    if not shape.has_norm:
        return 0.0
    return 2 * (2 * shape.whole_bytes / (profile.compute.memory_gbs * 1e3) + profile.compute.launch_us)


def _is_faster_at(sizes: tuple[float, ...], profile: Profile, shape: SiteShape, strategy: Strategy, more_us: float) -> bool:
    plain = [fused_us(profile, shape, NONE, size) for size in sizes]
    fused = [fused_us(profile, shape, strategy, size) for size in sizes]
    return all(p is not None and f is not None and f < p + more_us for p, f in zip(plain, fused, strict=True))


def _margin_us(profile: Profile, shape: SiteShape, us: float) -> float:
    margin = max(MARGIN_US, MARGIN * us)
    return margin if measured_ranks(profile, shape) == shape.ranks else 2 * margin


def _reason(predictions: dict[str, Prediction], best: Strategy, shape: SiteShape, profile: Profile) -> str:
    times = ", ".join(f"{s} {p.us:.1f}" for s, p in predictions.items())
    measured = measured_ranks(profile, shape)
    measure = f"torchrun --nproc-per-node {shape.ranks} -m ub_overlap calibrate"
    assumed = f"; assumed for {shape.ranks} ranks from measurements of {measured}, to measure: {measure}"
    assumed = "" if measured == shape.ranks else assumed
    saved = predictions[str(NONE)].us - predictions[str(best)].us
    text = f"{best} saves {saved:.1f}" if best != NONE else "no kernel saves enough"
    return f"predicted us by profile {profile}: {times}; {text}{assumed}"

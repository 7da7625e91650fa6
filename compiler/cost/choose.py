"""(shape, profile) -> the strategy that is predicted to be fastest, with a preference for the simpler."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ..plan import NONE, Strategy
from .predict import Prediction, candidates, predict
from .profile import Profile
from .shape import SiteShape

MARGIN = 0.03
MARGIN_US = 5.0
"""What a more complicated strategy must save, as a share and in microseconds: predictions err by as much."""


@dataclass(frozen=True, slots=True)
class Choice:
    """`predictions`: by strategy, as text. `reason`: the reckoning in a sentence. `gain_us`: against the plain way."""

    strategy: Strategy
    predictions: dict[str, Prediction]
    reason: str
    gain_us: float


def choose(shape: SiteShape, profile: Profile, overlap_only: bool = False) -> Choice:
    """The cheapest strategy. `overlap_only`: of those that overlap (the plain way is still predicted).

    Strategies are met from the simplest to the most complicated (none, one piece, few pieces, many, stripes); one takes the
    place of the best so far only if it saves MARGIN of its time and MARGIN_US.
    """
    return _choose(shape, profile, overlap_only)


@lru_cache(maxsize=1024)
def _choose(shape: SiteShape, profile: Profile, overlap_only: bool) -> Choice:
    found = {strategy: predict(shape, strategy, profile) for strategy in candidates(shape)}
    open_to = [s for s in found if s != NONE or not overlap_only] or [NONE]
    best = open_to[0]
    for strategy in open_to[1:]:
        saved = found[best].us - found[strategy].us
        if saved > max(MARGIN * found[best].us, MARGIN_US):
            best = strategy
    gain = found[NONE].us - found[best].us
    return Choice(best, {str(s): p for s, p in found.items()}, _reason(found, best, profile), gain)


def _reason(found: dict[Strategy, Prediction], best: Strategy, profile: Profile) -> str:
    times = ", ".join(f"{s} {p.us:.0f}" for s, p in found.items())
    return f"predicted us by profile {profile}: {times}; {best} saves {found[NONE].us - found[best].us:.0f}"

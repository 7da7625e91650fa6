"""(shape, profile) -> the strategy that is predicted to be fastest, with a preference for the simpler."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ..plan.strategy import NONE, DispatchTable, Mode, Strategy
from .predict import Prediction, candidates, predict
from .profile import Profile
from .site_shape import SiteShape

MARGIN = 0.02
MARGIN_US = 3.0
"""What a more complicated strategy must save, as a share and in microseconds: predictions err by as much."""
MARGIN_SENT = 0.25
"""No margin is more than this share of the collective alone, which is all that a strategy can save: beside a long matmul 2%
would be."""


@dataclass(frozen=True, slots=True)
class StrategyChoice:
    """`predictions`: by strategy, as text. `reason`: the reckoning in a sentence. `gain_us`: against the plain way. `open`:
    what could be chosen. `strategy` is a single one, until carry.py has made a table of several choices."""

    strategy: Strategy | DispatchTable
    predictions: dict[str, Prediction]
    reason: str
    gain_us: float
    open: tuple[Strategy, ...] = ()


def margin_us(us: float, plain: Prediction) -> float:
    """What must be saved to take the place of something that takes `us`. `plain`: the plain way."""
    return max(min(MARGIN * us, MARGIN_SENT * plain.communication_us), MARGIN_US)


def choose(
    shape: SiteShape, profile: Profile, overlap_only: bool = False, chunks: int = 0, timed: tuple[str, ...] = ()
) -> StrategyChoice:
    """The cheapest strategy. `overlap_only`: of those that overlap (the plain way is still predicted). `chunks`: in so many
    pieces if at all; 0: in any number. `timed`: of these alone, where any are given (for comparisons with measured times).

    Strategies are met from the simplest to the most complicated (none, one piece, few pieces, many, stripes); one takes the
    place of the best so far only if it saves `margin_us`.
    """
    return _choose(shape, profile, overlap_only, chunks, timed)


@lru_cache(maxsize=1024)
def _choose(shape: SiteShape, profile: Profile, overlap_only: bool, chunks: int, timed: tuple[str, ...]) -> StrategyChoice:
    open_to = candidates(shape)
    if chunks and not shape.bulk and len(open_to) > 1:
        open_to = [NONE, Strategy(Mode.PIPELINED, chunks)]
    if timed:
        open_to = [NONE, *(s for s in open_to if s != NONE and str(s) in timed)]
    found = {strategy: predict(shape, strategy, profile) for strategy in open_to}
    if overlap_only and len(open_to) > 1:  # one piece is a plain gather or scatter over our transport
        open_to = [s for s in open_to[1:] if s.mode is Mode.BULK or s.chunks != 1] or open_to[1:]
    elif timed and str(NONE) not in timed and len(open_to) > 1:
        open_to = open_to[1:]
    best = open_to[0]
    for strategy in open_to[1:]:
        saved = found[best].us - found[strategy].us
        if saved > margin_us(found[best].us, found[NONE]):
            best = strategy
    gain = found[NONE].us - found[best].us
    return StrategyChoice(best, {str(s): p for s, p in found.items()}, _reason(found, best, profile), gain, tuple(open_to))


def _reason(found: dict[Strategy, Prediction], best: Strategy, profile: Profile) -> str:
    times = ", ".join(f"{s} {p.us:.0f}" for s, p in found.items())
    saved = f"{best} saves {found[NONE].us - found[best].us:.0f}" if best != NONE else "nothing saves enough"
    return f"predicted us by profile {profile}: {times}; {saved}"

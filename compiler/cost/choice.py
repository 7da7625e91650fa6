"""(shape, profile) -> the strategy that is predicted to be fastest, with a preference for simpler ones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from ..plan.strategy import NONE, DispatchTable, Mode, Strategy
from .predict import Prediction, candidates, predict
from .profile import Profile
from .site_shape import SiteShape

MARGIN = 0.02
MARGIN_US = 3.0
"""The saving required of a more complicated strategy, as a share and in microseconds: the prediction error."""
MARGIN_SENT = 0.25
"""The margin is at most this share of the collective alone, which is all that a strategy can save. With a long matmul 2% would
be more."""


@dataclass(frozen=True, slots=True)
class StrategyChoice:
    """`predictions`: by strategy, as text. `reason`: the predictions in a sentence. `gain_us`: against no overlap. `open`: the
    strategies to choose from. `strategy` is a single one, until dispatch_table.py combines several choices in a table.
    `most_us`: the most that the site can gain with further independent matmuls, which fill the time that it waits."""

    strategy: Strategy | DispatchTable
    predictions: dict[str, Prediction]
    reason: str
    gain_us: float
    open: tuple[Strategy, ...] = ()
    most_us: float = math.inf


def margin_us(us: float, plain: Prediction) -> float:
    """Return the saving required to replace a strategy that takes `us`. `plain`: the prediction without overlap."""
    return max(min(MARGIN * us, MARGIN_SENT * plain.communication_us), MARGIN_US)


def choose(
    shape: SiteShape, profile: Profile, overlap_only: bool = False, chunks: int = 0, timed: tuple[str, ...] = ()
) -> StrategyChoice:
    """Return the cheapest strategy. `overlap_only`: only those that overlap (none is still predicted). `chunks`: the number of
    pieces; 0: any number. `timed`: only these, if any (for comparisons with measured times).

    Strategies are compared from the simplest to the most complicated: none, one piece, few pieces, many, stripes, direct. One
    replaces the best so far only if it saves `margin_us`.
    """
    return _choose(shape, profile, overlap_only, chunks, timed)


@lru_cache(maxsize=1024)
def _choose(shape: SiteShape, profile: Profile, overlap_only: bool, chunks: int, timed: tuple[str, ...]) -> StrategyChoice:
    open_to = candidates(shape, profile)
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
    most = max([0.0, *(found[NONE].us - p.us + p.idle_us for s, p in found.items() if s != NONE)])
    if profile.steps.gap_us:
        most = math.inf  # plain matmuls have gaps between them, those of one op have none
    texts = {str(s): p for s, p in found.items()}
    return StrategyChoice(best, texts, _reason(found, best, profile), gain, tuple(open_to), most)


def _reason(found: dict[Strategy, Prediction], best: Strategy, profile: Profile) -> str:
    times = ", ".join(f"{s} {p.us:.0f}" for s, p in found.items())
    saved = f"{best} saves {found[NONE].us - found[best].us:.0f}" if best != NONE else "nothing saves enough"
    return f"predicted us by profile {profile}: {times}; {saved}"

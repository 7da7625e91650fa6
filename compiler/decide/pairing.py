"""Which collective runs beside which matmuls: of every candidate one way or none, so that all of them together save the most.

A matmul serves one collective, no two sites may wait for each other (sites/order.py proves it, through all that is fused), and
what they hold may not lift the memory's peak. That is a weighted packing; it is solved in two steps:

    greedy   the way that is worth most of all is taken first
    windows  neighbouring candidates are taken back and searched through, by branch and bound, the rest as it is

A graph of one window is solved exactly. Beyond that the search is bounded by steps, never by time: all ranks find the same, and
the work grows as the graph does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..plan import Reason
from ..sites import Miss
from ..sites.order import Order
from .memory import Holds, Memory
from .ways import Offer, Way

WINDOW = 8
"""Candidates that are searched through together."""
TRIES = 8000
LEAST_TRIES = 60
"""Sites that are tried in the windows of a graph: so many over all of them, and so many at least in each."""
PASSES = 2
BETTER_US = 0.1
"""What is better by less is not."""


def pair(offers: Sequence[Offer], order: Order, memory: Memory) -> list[Way | Miss]:
    """By candidate: its way, which `order` then holds as fused, or why it has none."""
    state = _State(offers, order, memory)
    state.greedy()
    open_ = [i for i, offer in enumerate(offers) if offer.ways]
    windows = [open_[at : at + WINDOW] for at in range(0, max(1, len(open_) - WINDOW // 2), WINDOW // 2)]
    for _ in range(PASSES):
        if not [w for w in windows if state.improve(w, max(LEAST_TRIES, TRIES // len(windows)))]:
            break
    return [state.outcome(i) for i in range(len(offers))]


@dataclass(slots=True)
class _State:
    """What is taken so far. `taken`: the bits of all nodes in sites."""

    offers: Sequence[Offer]
    order: Order
    memory: Memory
    picks: dict[int, tuple[Way, Holds]] = field(default_factory=dict)
    taken: int = 0

    def place(self, i: int, way: Way) -> Miss | None:
        """Takes a way, or says why it does not fit what is taken."""
        if way.takes & self.taken:
            return Miss(Reason.MATMUL_TAKEN, _taken_text(self.offers[i]))
        holds = self.memory.holds(way.site.members) if way.bulk and self.offers[i].limited else []
        if not self.memory.fits(holds):
            return Miss(Reason.MEMORY, f"{_mib(holds)} MiB more would live beside a peak of {self.memory.most >> 20} MiB")
        if failed := self.order.fuse(way.site.members):
            return failed
        self.memory.add(holds)
        self.picks[i] = (way, holds)
        self.taken |= way.takes
        return None

    def release(self, i: int) -> Way:
        """Gives a candidate's nodes back."""
        way, holds = self.picks.pop(i)
        self.order.release(way.site.members)
        self.memory.add(holds, -1)
        self.taken &= ~way.takes
        return way

    def greedy(self) -> None:
        ways = [(way.worth, i, k) for i, offer in enumerate(self.offers) for k, way in enumerate(offer.ways)]
        for _, i, k in sorted(ways, key=lambda x: (-x[0], x[1], x[2])):
            if i not in self.picks:
                self.place(i, self.offers[i].ways[k])

    def improve(self, window: list[int], tries: int) -> bool:
        """Searches through what the candidates of `window` could have; True where they are worth more then."""
        before = {i: self.picks[i][0] for i in window if i in self.picks}
        worth = sum(way.worth for way in before.values())
        if worth + BETTER_US > sum(self.offers[i].ways[0].worth for i in window):
            return False  # each has its best
        for i in before:
            self.release(i)
        search = _Search(self, window, worth + BETTER_US, tries)
        search.run(0, 0.0)
        for i, way in (search.best or before).items():
            self.place(i, way)
        return search.best is not None

    def outcome(self, i: int) -> Way | Miss:
        if i in self.picks:
            return self.picks[i][0]
        offer = self.offers[i]
        lost: Miss | None = None
        for way in offer.ways:
            refused = self.place(i, way)
            if refused is None:
                return way
            lost = lost or refused
        if lost is not None and lost.reason is Reason.MEMORY:
            return lost
        return offer.miss or lost or Miss(Reason.NO_MATMUL, "no matmul produces, consumes or can run beside it")


class _Search:
    """Branch and bound over a window: candidates in order, each one's ways from the best on, then none."""

    def __init__(self, state: _State, window: list[int], floor: float, tries: int) -> None:
        self.state, self.window, self.floor, self.tries = state, window, floor, tries
        self.now: dict[int, Way] = {}
        self.best: dict[int, Way] | None = None

    def run(self, depth: int, worth: float) -> None:
        state = self.state
        if depth == len(self.window):
            if worth > self.floor:
                self.floor, self.best = worth + BETTER_US, dict(self.now)
            return
        i = self.window[depth]
        for way in state.offers[i].ways:
            if way.takes & state.taken:
                continue
            if worth + way.worth + self.rest(depth + 1, way.takes) <= self.floor:
                continue
            if self.tries <= 0:
                return
            self.tries -= 1
            if state.place(i, way) is None:
                self.now[i] = way
                self.run(depth + 1, worth + way.worth)
                del self.now[i]
                state.release(i)
        if worth + self.rest(depth + 1, 0) > self.floor:
            self.run(depth + 1, worth)

    def rest(self, depth: int, more: int) -> float:
        """What those from `depth` on can be worth at most, with `more` nodes taken."""
        taken = self.state.taken | more
        return sum(
            next((way.worth for way in self.state.offers[i].ways if not way.takes & taken), 0.0) for i in self.window[depth:]
        )


def _taken_text(offer: Offer) -> str:
    if not offer.ways[0].bulk:
        one = len(offer.ways[0].site.products) == 1
        return "its matmul already hides another collective" if one else "its matmuls already hide another collective"
    return "every independent matmul already hides another collective"


def _mib(holds: Holds) -> int:
    return sum(h[2] for h in holds) >> 20

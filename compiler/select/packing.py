"""Which collective runs beside which matmuls: of every candidate one way or none, so that all of them together save the most.

A matmul serves one collective, no two sites may wait for each other (sites/order.py proves it, through all that is fused), and
what lifts the memory's peak must be worth it. That is a weighted packing; it is solved in two steps:

    greedy   the way that is worth most of all is taken first
    windows  neighbouring candidates are taken back and searched through, by branch and bound, the rest as it is

A graph of one window is solved exactly. Beyond that the search is bounded by steps, never by time: all ranks find the same, and
the work grows as the graph does.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..match import Miss
from ..match.fusion_order import FusionOrder
from ..plan.decision import BulkEstimate
from ..plan.reasons import Reason
from .alternatives import Alternative, Alternatives
from .peak_memory import Holds, PeakMemory, total

WINDOW = 8
"""Candidates that are searched through together."""
TRIES = 8000
LEAST_TRIES = 60
"""Sites that are tried in the windows of a graph: so many over all of them, and so many at least in each."""
PASSES = 2
SHOWN = 4
"""Of a candidate that is not paired so many pairs are looked at for the report."""
BETTER_US = 0.1
"""What is better by less is not."""


def pair(
    offers: Sequence[Alternatives], order: FusionOrder, memory: PeakMemory
) -> list[tuple[Alternative | Miss, BulkEstimate | None]]:
    """By candidate: its way, which `order` then holds as fused, or why it has none; and what it weighed."""
    state = _State(offers, order, memory)
    state.greedy()
    open_ = [i for i, offer in enumerate(offers) if offer.ways]
    windows = [open_[at : at + WINDOW] for at in range(0, max(1, len(open_) - WINDOW // 2), WINDOW // 2)]
    for _ in range(PASSES):
        if not [w for w in windows if state.improve(w, max(LEAST_TRIES, TRIES // len(windows)))]:
            break
    chosen = [state.outcome(i) for i in range(len(offers))]
    return [(found, state.weighed(i)) for i, found in enumerate(chosen)]


@dataclass(frozen=True, slots=True)
class _Pick:
    """A way that is taken. `worth`: less what the memory costs by which it lifted the peak, of `lifts` bytes."""

    way: Alternative
    holds: Holds
    lifts: int
    worth: float


@dataclass(slots=True)
class _State:
    """What is taken so far. `taken`: the bits of all nodes in sites. `done`: of every step the candidate, its pick, whether it
    was taken (or given back), and the memory's peak before."""

    offers: Sequence[Alternatives]
    order: FusionOrder
    memory: PeakMemory
    picks: dict[int, _Pick] = field(default_factory=dict)
    taken: int = 0
    done: list[tuple[int, _Pick, bool, int]] = field(default_factory=list)

    def place(self, i: int, way: Alternative) -> Miss | None:
        """Takes a way, or says why it does not fit what is taken, or that it is not worth the memory."""
        offer = self.offers[i]
        if way.takes & self.taken:
            return Miss(Reason.MATMUL_TAKEN, _taken_text(offer))
        holds = self.memory.holds(way.site.members) if way.bulk and offer.limited else []
        lifts = self.memory.lift(holds)
        worth = way.worth - lifts * offer.byte_us
        if self.memory.top + lifts > self.memory.most:
            more = f"{total(holds) >> 20} MiB more would live beside a peak of {self.memory.most >> 20} MiB"
            return Miss(Reason.MEMORY, more)
        if lifts and worth <= 0:
            price = f"{lifts * offer.byte_us:.0f} us; it would save {way.saves_us:.0f}"
            more = f"{lifts >> 20} MiB more at the peak are worth {price}"
            return Miss(Reason.MEMORY, more)
        if failed := self.order.fuse(way.site.members):
            return failed
        self._take(i, _Pick(way, holds, lifts, worth))
        return None

    def _take(self, i: int, pick: _Pick) -> None:
        self.done.append((i, pick, True, self.memory.top))
        self.memory.add(pick.holds)
        self.picks[i] = pick
        self.taken |= pick.way.takes

    def release(self, i: int) -> None:
        """Gives a candidate's nodes back."""
        pick = self.picks.pop(i)
        self.done.append((i, pick, False, self.memory.top))
        self.order.release(pick.way.site.members)
        self.memory.remove(pick.holds)
        self.taken &= ~pick.way.takes

    def mark(self) -> tuple[int, int]:
        return len(self.done), self.order.mark()

    def back(self, mark: tuple[int, int]) -> None:
        """Makes everything as it was at `mark`."""
        while len(self.done) > mark[0]:
            i, pick, placed, top = self.done.pop()
            if placed:
                del self.picks[i]
                self.taken &= ~pick.way.takes
                self.memory.remove(pick.holds)
            else:
                self.picks[i] = pick
                self.taken |= pick.way.takes
                self.memory.add(pick.holds)
            self.memory.top = top
        self.order.back(mark[1])

    def greedy(self) -> None:
        heap = [(-way.worth, i, k) for i, offer in enumerate(self.offers) for k, way in enumerate(offer.ways)]
        heapq.heapify(heap)
        while heap:
            worth, i, k = heapq.heappop(heap)
            if i in self.picks:
                continue
            way, mark = self.offers[i].ways[k], self.mark()
            if self.place(i, way) is None and heap and -self.picks[i].worth > heap[0][0] and -worth > self.picks[i].worth:
                later = (-self.picks[i].worth, i, k)  # what it costs in memory puts it behind others
                self.back(mark)
                heapq.heappush(heap, later)

    def improve(self, window: list[int], tries: int) -> bool:
        """Searches through what the candidates of `window` could have; True where they are worth more then."""
        before = [i for i in window if i in self.picks]
        worth = sum(self.picks[i].worth for i in before)
        if worth + BETTER_US > sum(self.offers[i].ways[0].worth for i in window):
            return False  # each has its best
        mark = self.mark()
        for i in before:
            self.release(i)
        search = _Search(self, window, worth + BETTER_US, tries)
        search.run(0, 0.0)
        # The same steps from the same state: they are taken again, or all is as it was.
        if search.best is None or any(self.place(i, way) is not None for i, way in search.best.items()):
            self.back(mark)
            return False
        return True

    def weighed(self, i: int) -> BulkEstimate | None:
        """What was open to a candidate beside other matmuls, and with its own."""
        offer, pick = self.offers[i], self.picks.get(i)
        others = [w for w in offer.ways if w.bulk][:SHOWN]
        if not others or not offer.limited:
            return None
        own = max((w for w in offer.ways if not w.bulk), key=lambda w: w.saves_us, default=None)
        if pick and pick.way.bulk:
            saves, holds, lifts = pick.way.saves_us, pick.holds, pick.lifts
        else:
            held = [(w.saves_us, holds := self.memory.holds(w.site.members), self.memory.lift(holds)) for w in others]
            saves, holds, lifts = max(held, key=lambda x: x[0] - x[2] * offer.byte_us)
        return BulkEstimate(round(saves, 2), total(holds), lifts, round(own.saves_us, 2) if own else None)

    def outcome(self, i: int) -> Alternative | Miss:
        if i in self.picks:
            return self.picks[i].way
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
        self.now: dict[int, Alternative] = {}
        self.best: dict[int, Alternative] | None = None

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
            mark = state.mark()
            if state.place(i, way) is None:
                self.now[i] = way
                self.run(depth + 1, worth + state.picks[i].worth)
                del self.now[i]
                state.back(mark)
        if worth + self.rest(depth + 1, 0) > self.floor:
            self.run(depth + 1, worth)

    def rest(self, depth: int, more: int) -> float:
        """What those from `depth` on can be worth at most, with `more` nodes taken."""
        taken = self.state.taken | more
        return sum(
            next((way.worth for way in self.state.offers[i].ways if not way.takes & taken), 0.0) for i in self.window[depth:]
        )


def _taken_text(offer: Alternatives) -> str:
    if not offer.ways[0].bulk:
        one = len(offer.ways[0].site.matmuls) == 1
        return "its matmul already hides another collective" if one else "its matmuls already hide another collective"
    return "every independent matmul already hides another collective"

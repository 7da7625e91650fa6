"""Selection of at most one alternative per candidate, so that all of them together have the largest benefit.

A matmul serves one collective. No two sites may wait for each other: match/fusion_order.py proves it, through all that is
fused. A higher memory peak must be worth its price. This is a weighted set packing problem, solved in two steps:

    greedy    the alternative with the largest benefit of all is placed first
    windows   neighboring candidates are released and searched by branch and bound, with the rest fixed

A graph of one window is solved exactly. Beyond that the search is bounded by steps, never by time: all ranks find the same, and
the work grows as the graph does.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..cost.choice import StrategyChoice
from ..match import Miss, Site
from ..match.fusion_order import FusionOrder
from ..plan.decision import IndependentEstimate
from ..plan.reasons import Reason
from .alternatives import Alternative, Alternatives
from .benefit import NO_BENEFIT, Benefit, total_benefit
from .peak_memory import HeldBytes, PeakMemory, total_bytes

WINDOW = 8
"""Candidates that are searched together."""
TRIES = 2000
LEAST_TRIES = 20
"""Sites tried over all windows of a graph, and at least in each window."""
PASSES = 2
SHOWN = 4
"""Bulk alternatives considered for the report of a candidate that is not bulk."""
BETTER_US = 0.1
"""Differences below this are treated as noise."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """The selected alternative of one candidate, or the miss that says why it has none."""

    alternatives: Alternatives
    result: Alternative | Miss
    estimate: IndependentEstimate | None
    """Cost and saving of bulk overlap, where it was considered."""

    @property
    def alternative(self) -> Alternative | None:
        return None if isinstance(self.result, Miss) else self.result

    @property
    def miss(self) -> Miss | None:
        return self.result if isinstance(self.result, Miss) else None

    @property
    def site(self) -> Site | None:
        return self.alternative.site if self.alternative else None

    @property
    def choice(self) -> StrategyChoice | None:
        """The predictions behind the selection."""
        return self.alternative.choice if self.alternative else self.alternatives.choice


def assign_alternatives(candidates: Sequence[Alternatives], order: FusionOrder, memory: PeakMemory) -> list[Assignment]:
    """Select an alternative for each candidate. `order` holds the selected sites as fused afterwards."""
    state = _State(candidates, order, memory)
    state.place_greedily()
    open_candidates = [i for i, alternatives in enumerate(candidates) if alternatives.ranked]
    starts = range(0, max(1, len(open_candidates) - WINDOW // 2), WINDOW // 2)
    windows = [open_candidates[start : start + WINDOW] for start in starts]
    for _ in range(PASSES):
        if not [w for w in windows if state.improve(w, max(LEAST_TRIES, TRIES // len(windows)))]:
            break
    results = [state.result(i) for i in range(len(candidates))]
    return [Assignment(candidates[i], result, state.estimate(i)) for i, result in enumerate(results)]


@dataclass(frozen=True, slots=True)
class _Placement:
    """A placed alternative. `benefit`: minus the price of `peak_growth` bytes at the memory peak."""

    alternative: Alternative
    held: HeldBytes
    peak_growth: int
    benefit: Benefit


@dataclass(slots=True)
class _State:
    """The placements so far. `used_matmuls`: the bits of all matmuls in sites. `log`: of each step the candidate, its
    placement, whether it was placed (or released), and the memory peak before."""

    candidates: Sequence[Alternatives]
    order: FusionOrder
    memory: PeakMemory
    placements: dict[int, _Placement] = field(default_factory=dict)
    used_matmuls: int = 0
    log: list[tuple[int, _Placement, bool, int]] = field(default_factory=list)
    _held: dict[int, HeldBytes] = field(default_factory=dict)
    """By the id of an alternative: they are placed many times."""

    def place(self, i: int, alternative: Alternative) -> Miss | None:
        """Place an alternative of candidate `i`, or return why it does not fit or is not worth its memory."""
        alternatives = self.candidates[i]
        if alternative.matmul_bits & self.used_matmuls:
            return Miss(Reason.MATMUL_TAKEN, _taken_text(alternatives))
        held = self._held_by(alternative) if alternatives.counts_memory else []
        peak_growth = self.memory.growth_with(held)
        price_us = peak_growth * alternatives.us_per_byte
        benefit = alternative.benefit.plus_us(-price_us)
        if self.memory.current_peak + peak_growth > self.memory.limit:
            text = f"the peak would grow by {peak_growth >> 20} MiB, above its limit of {self.memory.limit >> 20} MiB"
            return Miss(Reason.MEMORY, text)
        if peak_growth and benefit <= NO_BENEFIT:
            text = f"{peak_growth >> 20} MiB more at the peak are worth {price_us:.0f} us; it would save"
            return Miss(Reason.MEMORY, f"{text} {alternative.saved_us:.0f}")
        if failed := self.order.fuse(alternative.site.members):
            return failed
        placement = _Placement(alternative, held, peak_growth, benefit)
        self.log.append((i, placement, True, self.memory.current_peak))
        self._add(i, placement)
        return None

    def _held_by(self, alternative: Alternative) -> HeldBytes:
        held = self._held.get(id(alternative))
        if held is None:
            held = self._held[id(alternative)] = self.memory.held_by_independent(alternative.site)
        return held

    def _add(self, i: int, placement: _Placement) -> None:
        self.memory.add(placement.held)
        self.placements[i] = placement
        self.used_matmuls |= placement.alternative.matmul_bits

    def _remove(self, i: int, peak: int | None = None) -> None:
        """Remove a placement. `peak`: the memory peak afterwards, where it is known."""
        placement = self.placements.pop(i)
        self.memory.remove(placement.held, peak)
        self.used_matmuls &= ~placement.alternative.matmul_bits

    def release(self, i: int) -> None:
        """Remove the placement of candidate `i`."""
        placement = self.placements[i]
        self.log.append((i, placement, False, self.memory.current_peak))
        self.order.release(placement.alternative.site.members)
        self._remove(i)

    def mark(self) -> tuple[int, int]:
        return len(self.log), self.order.mark()

    def undo_to(self, mark: tuple[int, int]) -> None:
        """Restore the state at `mark`."""
        while len(self.log) > mark[0]:
            i, placement, was_placed, peak_before = self.log.pop()
            if was_placed:
                self._remove(i, peak_before)
            else:
                self._add(i, placement)
                self.memory.current_peak = peak_before
        self.order.back(mark[1])

    def place_greedily(self) -> None:
        heap = [(a.benefit.negated, i, k) for i, found in enumerate(self.candidates) for k, a in enumerate(found.ranked)]
        heapq.heapify(heap)
        while heap:
            key, i, k = heapq.heappop(heap)
            if i in self.placements:
                continue
            mark = self.mark()
            if self.place(i, self.candidates[i].ranked[k]) is not None:
                continue
            key_with_memory = self.placements[i].benefit.negated
            if heap and key_with_memory > heap[0][0] and key_with_memory > key:
                self.undo_to(mark)  # its memory price puts it after others
                heapq.heappush(heap, (key_with_memory, i, k))

    def improve(self, window: list[int], tries: int) -> bool:
        """Search the alternatives of the candidates of `window`. Return whether they have a larger benefit then."""
        before = [i for i in window if i in self.placements]
        benefit = total_benefit([self.placements[i].benefit for i in before])
        if benefit.plus_us(BETTER_US) > total_benefit([self.candidates[i].ranked[0].benefit for i in window]):
            return False  # each has its best
        mark = self.mark()
        for i in before:
            self.release(i)
        search = _Search(self, window, benefit.plus_us(BETTER_US), tries)
        search.run(0, NO_BENEFIT)
        # The same steps from the same state: either all are placed again, or the state is restored.
        if search.best is None or any(self.place(i, a) is not None for i, a in search.best.items()):
            self.undo_to(mark)
            return False
        return True

    def estimate(self, i: int) -> IndependentEstimate | None:
        """Return the savings with independent matmuls and with the candidate's own matmuls alone."""
        alternatives, placement = self.candidates[i], self.placements.get(i)
        moving = [a for a in alternatives.ranked if a.moves_matmuls][:SHOWN]
        if not moving or not alternatives.counts_memory or not alternatives.us_per_byte:
            return None
        own = max((a for a in alternatives.ranked if not a.moves_matmuls), key=lambda a: a.saved_us, default=None)
        if placement and placement.alternative.moves_matmuls:
            saved_us, held, peak_growth = placement.alternative.saved_us, placement.held, placement.peak_growth
        else:
            options = [(a.saved_us, held := self._held_by(a), self.memory.growth_with(held)) for a in moving]
            saved_us, held, peak_growth = max(options, key=lambda x: x[0] - x[2] * alternatives.us_per_byte)
        return IndependentEstimate(round(saved_us, 2), total_bytes(held), peak_growth, round(own.saved_us, 2) if own else None)

    def result(self, i: int) -> Alternative | Miss:
        if i in self.placements:
            return self.placements[i].alternative
        alternatives = self.candidates[i]
        lost: Miss | None = None
        for alternative in alternatives.ranked:
            refused = self.place(i, alternative)
            if refused is None:
                return alternative
            lost = lost or refused
        if lost is not None and lost.reason is Reason.MEMORY:
            return lost
        return alternatives.miss or lost or Miss(Reason.NO_MATMUL, "no matmul produces or consumes it, and none is independent")


class _Search:
    """Branch and bound over a window: candidates in order; of each its alternatives from the best on, then none."""

    def __init__(self, state: _State, window: list[int], floor: Benefit, tries: int) -> None:
        self.state, self.window, self.floor, self.tries = state, window, floor, tries
        self.selected: dict[int, Alternative] = {}
        self.best: dict[int, Alternative] | None = None

    def run(self, depth: int, benefit: Benefit) -> None:
        state = self.state
        if depth == len(self.window):
            if benefit > self.floor:
                self.floor, self.best = benefit.plus_us(BETTER_US), dict(self.selected)
            return
        i = self.window[depth]
        for alternative in state.candidates[i].ranked:
            if alternative.matmul_bits & state.used_matmuls:
                continue
            if self.bound([benefit, alternative.benefit], depth + 1, alternative.matmul_bits) <= self.floor:
                continue
            if self.tries <= 0:
                return
            self.tries -= 1
            mark = state.mark()
            if state.place(i, alternative) is None:
                self.selected[i] = alternative
                self.run(depth + 1, benefit.plus(state.placements[i].benefit))
                del self.selected[i]
                state.undo_to(mark)
        if self.bound([benefit], depth + 1, 0) > self.floor:
            self.run(depth + 1, benefit)

    def bound(self, benefits: list[Benefit], depth: int, more_matmuls: int) -> Benefit:
        """Return `benefits` plus the most that the candidates from `depth` on can add, with `more_matmuls` used."""
        used = self.state.used_matmuls | more_matmuls
        for i in self.window[depth:]:
            for alternative in self.state.candidates[i].ranked:
                if not alternative.matmul_bits & used:
                    benefits.append(alternative.benefit)
                    break
        return total_benefit(benefits)


def _taken_text(alternatives: Alternatives) -> str:
    own = next((a for a in alternatives.ranked if not a.moves_matmuls), None)
    if own is None:
        return "every independent matmul already hides another collective"
    one = len(own.site.matmuls) == 1
    return "its matmul already hides another collective" if one else "its matmuls already hide another collective"

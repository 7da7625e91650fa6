"""Choose the collectives of a graph that are split, against their other alternatives, and place them.

1. Each collective with a window has a best case: all that runs in the window hides its transfer.
2. Alternatives that save less than the best case are set aside; the others are assigned first. Fused sites cannot move.
3. The windows are placed between them (placement.py).
4. A collective that saves less there than by what was set aside gets its alternatives back, and all is done again: first
   those whose matmuls are in no placed window, which would have less to hide behind, then all.
5. What saves most is taken.
6. Neighbors are sent together in buckets (buckets.py), where that saves more: also those with kernels for few tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from torch.fx import Graph, Node

from ..match import Candidate, Miss
from ..match.collectives import Op
from ..match.fusion_order import FusionOrder
from ..overrides.requested_strategy import Override
from ..plan.reasons import Reason
from ..select.alternatives import Alternatives
from ..select.assignment import Assignment
from ..select.benefit import Benefit
from ..select.profitability import SiteCosts
from .placed_record import Places, saved_us
from .ring_slots import has_ring
from .split_candidates import SplitCandidate, find_splits
from .split_planner import SplitChoice, SplitPlanner

ROUNDS = 4
"""Arrangements that are tried at most."""
BUCKET_ROUNDS = 12
"""Sets of buckets that are tried at most, each without the losers of the one before."""
Assign = Callable[[Sequence[Alternatives]], tuple[list[Assignment], FusionOrder]]
"""Alternatives of all candidates -> the selected ones, and the order in which they are fused."""


def choose_splits(
    graph: Graph,
    candidates: Sequence[Candidate],
    found: Sequence[Alternatives],
    overrides: Mapping[int, Override],
    costs: SiteCosts,
    assign: Assign,
    parameters: Collection[Node] | None,
) -> SplitChoice:
    """Return the assignments of all candidates, some of them split.

    `overrides`: by number of the candidate. `parameters`: as in `Window.is_at_the_edge`.
    """
    forced = _without_form(assign(found)[0]) if costs.policy.is_forced and costs.policy.may_split else ()
    exchanges = any(candidates[i].collective.op is Op.ALL_TO_ALL for i in forced)
    may_differ = exchanges or has_ring(graph, candidates, parameters)
    if may_differ:  # ranks of a ring, or with other rows to exchange, hold other tensors, so their peaks differ
        found = [replace(alternatives, counts_memory=False) for alternatives in found]
    splits = find_splits(graph, candidates, found, overrides, costs, parameters, forced)
    if not splits:
        return SplitChoice(*assign(found))
    planner = SplitPlanner(graph, candidates, found, costs, splits, may_differ)
    if not planner.splits and not planner.may_join:
        return SplitChoice(*assign(found))
    best = _best_round(planner, assign)
    if planner.may_join:
        best = _with_buckets(planner, assign, best)
    planner.splits, lost = best.splits, best.lost
    assignments = [replace(a, result=_TAKEN) if i in lost else a for i, a in enumerate(best.assignments)]
    return planner.choice(assignments, best.order, best.placed)


def _without_form(assignments: Sequence[Assignment]) -> set[int]:
    """Return the candidates that got no form with matmuls: they have none, others have them, or no op serves their group."""
    return {i for i, assigned in enumerate(assignments) if assigned.alternative is None}


@dataclass(frozen=True, slots=True)
class _Round:
    """One arrangement of a graph, and what it is worth. `kept`: the alternatives that were weighed. `splits`: in halves or
    whole, as placed. `reduced`: candidates whose alternatives were set aside."""

    worth: Benefit
    kept: list[Alternatives]
    assignments: list[Assignment]
    order: FusionOrder
    placed: dict[int, Places]
    splits: dict[int, SplitCandidate]
    reduced: frozenset[int]

    @property
    def lost(self) -> set[int]:
        """The candidates whose alternatives were set aside, and that are not placed."""
        open_splits = {i for s in self.splits.values() if s.number not in self.placed for i in s.numbers}
        return {i for i in self.reduced & open_splits if self.assignments[i].alternative is None}

    @property
    def worth_with_delays(self) -> Benefit:
        """The worth less the time for which other collectives wait for those that are placed."""
        return self.worth.plus_us(-sum(p.delays_us for places in self.placed.values() for p in places))

    def saved_us(self, i: int) -> float:
        """Return what candidate `i` saves alone, less the time for which other collectives wait for it."""
        alternative, places = self.assignments[i].alternative, self.placed.get(i, ())
        return alternative.benefit.saved_us if alternative else saved_us(places) - sum(p.delays_us for p in places)


_TAKEN = Miss(Reason.MATMUL_TAKEN, "its matmuls hide split collectives, which saves more")


def _best_round(planner: SplitPlanner, assign: Assign) -> _Round:
    """Return the best of several arrangements."""
    found = planner.found
    kept = [planner.set_aside(i, alternatives) for i, alternatives in enumerate(found)]
    best: _Round | None = None
    given: set[int] = set()
    reduced = {i for i, alternatives in enumerate(found) if alternatives.ranked and kept[i] is not alternatives}
    for number in range(ROUNDS):
        assignments, order = assign(kept)
        placed = planner.place(assignments, order)
        worth = planner.worth(assignments, placed, reduced)
        this = _Round(worth, list(kept), assignments, order, placed, dict(planner.splits), frozenset(reduced))
        if best is None or this.worth >= best.worth:  # the last of equals: its reasons are about all alternatives
            best = this
        back = [
            i
            for s in planner.splits.values()
            if planner.is_better_fused(s, placed)
            for i in s.numbers
            if kept[i] is not found[i] and assignments[i].alternative is None
        ]
        apart = {i: a for i in back if i not in given and (a := _outside(i, found[i], placed, order)).ranked}
        given |= apart.keys()
        if number == ROUNDS - 2:  # the last round has them all
            apart = {}
        for i in apart or back:
            kept[i] = apart.get(i, found[i])
            reduced.discard(i)
        if not back:
            break
    assert best is not None
    return best


def _with_buckets(planner: SplitPlanner, assign: Assign, alone: _Round) -> _Round:
    """Return `alone` with collectives in those buckets that save more than their members alone, or `alone` itself.

    Large and small ones in buckets of their own are another arrangement.
    """
    best, tried = alone, list[list[tuple[int, ...]]]()
    for mixed in (True, False) if planner.costs.policy.may_coalesce else (False,):
        planner.splits = dict(alone.splits)
        buckets = planner.find_buckets(alone.assignments, alone.order, mixed)
        for _ in range(BUCKET_ROUNDS):
            if not buckets or [b.numbers for b in buckets] in tried:
                break
            tried.append([b.numbers for b in buckets])
            this = _arrange(planner, assign, alone, buckets)
            gains = {b.number: this.saved_us(b.number) - sum(map(alone.saved_us, b.numbers)) for b in buckets}
            dropped = {i for i, gain in gains.items() if gain <= 0}
            if not dropped and this.lost <= alone.lost:
                best = max(best, this, key=lambda one: one.worth_with_delays)  # the first of equals
                break
            dropped = dropped or {min(gains, key=lambda i: (gains[i], i))}  # another collective found no place
            buckets = [b for b in buckets if b.number not in dropped]
    return best


def _arrange(planner: SplitPlanner, assign: Assign, alone: _Round, buckets: Sequence[SplitCandidate]) -> _Round:
    """Return the arrangement with `buckets` in place of their members."""
    joined = {i for b in buckets for i in b.numbers}
    planner.splits = {i: s for i, s in alone.splits.items() if i not in joined} | {b.number: b for b in buckets}
    planner.splits = dict(sorted(planner.splits.items()))
    kept = [replace(a, ranked=[]) if i in joined and a.ranked else a for i, a in enumerate(alone.kept)]
    if any(alone.assignments[i].alternative is not None for i in joined):
        assignments, order = assign(kept)
    else:
        assignments, order = alone.assignments, alone.order
    placed = planner.place(assignments, order)
    worth = planner.worth(assignments, placed, alone.reduced)
    return _Round(worth, kept, assignments, order, placed, dict(planner.splits), alone.reduced)


def _outside(i: int, alternatives: Alternatives, placed: Mapping[int, Places], order: FusionOrder) -> Alternatives:
    """Return those alternatives of candidate `i` that take no node out of a window in which another collective is placed."""
    inside = [(p.start, p.finish) for j, places in placed.items() if j != i for p in places]
    ranked = [
        a
        for a in alternatives.ranked
        if not any(begin <= order.position[m] < end for m in a.site.members for begin, end in inside)
    ]
    return replace(alternatives, ranked=ranked)

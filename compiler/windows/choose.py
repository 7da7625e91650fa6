"""Choose the collectives of a graph that are split, against their other alternatives, and place them.

1. Each collective with a window has a best case: all that runs in the window hides its transfer.
2. Alternatives that save less than the best case are set aside; the others are assigned first. Fused sites cannot move.
3. The windows are placed between them (placement.py).
4. A collective that saves less there than by what was set aside gets its alternatives back, and all is done again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch.fx import Graph, Node

from ub_overlap.runtime.schedule.steps import PLAN_SLOTS

from ..cost.choice import MARGIN_US, StrategyChoice
from ..cost.predict import Prediction
from ..cost.profile import Profile
from ..cost.site_sizes import shape_of_site
from ..cost.split_time import split_times
from ..match import Candidate, Miss, Split
from ..match.all_to_all import finishes_together
from ..match.collectives import Collective, Op
from ..match.fusion_order import FusionOrder
from ..match.site import FIRST_HALF
from ..match.window import Window, moving_nodes
from ..overrides.requested_strategy import Override
from ..plan.decision import SplitWindow
from ..plan.reasons import Reason
from ..plan.strategy import NONE
from ..select.alternatives import Alternative, Alternatives
from ..select.assignment import Assignment
from ..select.benefit import NO_BENEFIT, Benefit
from ..select.profitability import SiteCosts
from .hierarchy import shortest_us
from .landing_result import release_position
from .node_times import NodeTimes, is_compute, next_to_collectives
from .placement import NETWORK, PORT, Item, Limits, Placed, Transfer, place
from .ring_slots import fix_slots
from .split_candidates import SplitCandidate, find_splits

ROUNDS = 2
"""Rounds in which collectives get their other alternatives back."""
MARGIN = 0.05
"""The saving required of a split collective, as a share of the plain one."""

Places = tuple[Placed, ...]
"""The places of one collective: one, or those of its two halves in order."""
Assign = Callable[[Sequence[Alternatives]], tuple[list[Assignment], FusionOrder]]
"""Alternatives of all candidates -> the selected ones, and the order in which they are fused."""


@dataclass(slots=True)
class SplitChoice:
    """What was chosen for one graph: its assignments, and the order with the places of the split collectives."""

    assignments: list[Assignment]
    order: FusionOrder
    windows: dict[int, SplitWindow] = field(default_factory=dict)
    """By the number of the candidate."""
    entries: dict[tuple[int, str], tuple[Window, Placed]] = field(default_factory=dict)
    """By the number of the candidate and FIRST_HALF for the first half of a hierarchical collective, else ""."""
    inner: set[int] = field(default_factory=set)
    """The split collectives in the middle of the graph."""


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
    splits = find_splits(graph, candidates, found, overrides, costs, parameters)
    if not splits:
        return SplitChoice(*assign(found))
    planner = _Planner(graph, candidates, costs, splits)
    kept = [planner.set_aside(i, alternatives) for i, alternatives in enumerate(found)]
    for last in (*[False] * ROUNDS, True):
        assignments, order = assign(kept)
        placed = planner.place(assignments, order)
        back = [
            i
            for i in planner.splits
            if kept[i] is not found[i] and assignments[i].alternative is None and planner.is_better_fused(i, placed, found[i])
        ]
        if not back or last:
            break
        for i in back:
            kept[i] = found[i]
    return planner.choice(assignments, order, placed)


@dataclass(slots=True)
class _Planner:
    """The windows of one graph. `splits`: by number of the candidate."""

    graph: Graph
    candidates: Sequence[Candidate]
    costs: SiteCosts
    splits: dict[int, SplitCandidate]
    _clock: list[float] = field(init=False)
    """Microseconds of the graph's nodes, in the order with nothing fused."""
    _plain_order: FusionOrder = field(init=False)
    """The order with nothing fused."""

    def __post_init__(self) -> None:
        untimed = next_to_collectives(self.graph, [(c.collective, c.match) for c in self.candidates])
        differs = any(s.by_order for s in self.splits.values())
        times = NodeTimes.of(self.graph, self._profile(), self.costs.hints, untimed, only_compute=differs)
        self._plain_order = FusionOrder(self.graph)
        self._clock = [times.us(n) for n in self._plain_order.items]
        for i, s in self.splits.items():
            if s.halves is not None and not self._is_faster_in_halves(s):
                self.splits[i] = replace(s, halves=None)

    def _profile(self) -> Profile:
        """Return the profile of the first window."""
        c = next(iter(self.splits.values())).window.collective
        return self.costs.policy.profile(c.ranks, c.node.meta["val"].device.type)

    def needed_us(self, s: SplitCandidate) -> float:
        return max(MARGIN_US, MARGIN * s.times.plain_us)

    def _hidden_us(self, s: SplitCandidate) -> float:
        """Return the time of all that runs in a window."""
        first, last = s.window.bounds(self._plain_order, moving_nodes(other.window for other in self.splits.values()))
        return sum(self._clock[first:last])

    def _is_faster_in_halves(self, s: SplitCandidate) -> bool:
        if self.costs.policy.hierarchical == "force":
            return True
        assert s.halves is not None
        hidden, (first, second) = self._hidden_us(s), s.halves
        return shortest_us((first.times, second.times), hidden) + MARGIN_US < shortest_us((s.times,), hidden)

    def best_us(self, s: SplitCandidate) -> float:
        """Return the saving where nothing else uses the links."""
        hidden, forms = self._hidden_us(s), [h.times for h in s.halves] if s.halves else [s.best_times]
        transfer = sum(t.transfer_us for t in forms)
        return s.times.plain_us - sum(t.shortest_us for t in forms) - max(0.0, transfer - hidden)

    def set_aside(self, i: int, alternatives: Alternatives) -> Alternatives:
        """Return the alternatives that save more than splitting the candidate can, by what they save more.

        So the assignment weighs them against the split form, which the candidate has without them. Windows that cannot save
        enough are dropped.
        """
        if i not in self.splits:
            return alternatives
        s = self.splits[i]
        best = self.best_us(s)
        if not s.is_required and best < self.needed_us(s):
            del self.splits[i]
            return (
                alternatives if alternatives.ranked else replace(alternatives, miss=_explain_loss(s, best) or alternatives.miss)
            )
        reduced = [replace(a, benefit=a.benefit.plus_us(-best)) for a in alternatives.ranked]
        return replace(alternatives, ranked=[a for a in reduced if a.benefit > NO_BENEFIT and not s.is_required])

    def place(self, assignments: Sequence[Assignment], order: FusionOrder) -> dict[int, Places]:
        """Return the places of the windows that other sites leave open.

        Halves need more slots and memory than one collective. So all are also placed as one, and then those in halves that
        saved more so. What saves most together is kept, from then on.
        """
        open_splits = {i: s for i, s in self.splits.items() if assignments[i].alternative is None}
        if not open_splits:
            return {}
        items = self._items(assignments, order, set(open_splits))
        placed = self._place(items, open_splits, order)
        halves = {i for i, s in open_splits.items() if s.halves is not None}
        if not halves:
            return placed
        tried = [(halves, placed)]
        if self.costs.policy.hierarchical == "force":
            kept = halves & placed.keys()
        else:
            whole = self._place(items, _in_halves(open_splits, set()), order)
            tried.append((set(), whole))
            kept = {i for i in halves & placed.keys() if _saved_us(placed[i]) > _saved_us(whole.get(i, ()))}
        if kept != halves:
            tried.append((kept, self._place(items, _in_halves(open_splits, kept), order)))
        kept, placed = max(tried, key=lambda one: self._worth(one[1]))
        self.splits |= _in_halves(open_splits, kept)
        return placed

    def _worth(self, placed: Mapping[int, Places]) -> tuple[int, float]:
        """Return the number of required collectives that are placed, and what all save."""
        return sum(self.splits[i].is_required for i in placed), sum(map(_saved_us, placed.values()))

    def _place(self, items: Sequence[Item], open_splits: Mapping[int, SplitCandidate], order: FusionOrder) -> dict[int, Places]:
        splits = list(open_splits.values())
        moving = moving_nodes(s.window for s in splits)
        owners = [s for s in splits for _ in s.halves or (s,)]
        transfers = [t for s in splits for t in self._transfers(s, order, moving)]
        for k, s in enumerate(owners):
            if s.halves is not None and k > 0 and owners[k - 1] is s:
                transfers[k] = replace(transfers[k], first_half=k - 1)
        fix_slots(transfers, {k: s.window.collective.op for k, s in enumerate(owners) if s.by_order})
        in_place = {k: t for k, (s, t) in enumerate(zip(owners, transfers, strict=True)) if s.zero_copy_times}
        zero_copy = {k: z for k, t in in_place.items() if (z := self._without_copy(owners[k], t, order, moving))}
        result = place(items, transfers, Limits(self.costs.policy.split_bytes, len(PLAN_SLOTS)), zero_copy)
        placed: dict[int, Places] = {}
        for s, p in zip(owners, result, strict=True):
            if p is not None:
                placed[s.number] = (*placed.get(s.number, ()), p)
        return placed

    def _transfers(self, s: SplitCandidate, order: FusionOrder, moving: Mapping[Node, object]) -> list[Transfer]:
        """Return the transfer of a collective, or those of its halves."""
        whole = self._transfer(s, order, moving)
        if s.halves is None:
            return [whole]
        return [
            replace(
                whole,
                group=h.half.group,
                start_us=h.times.start_us,
                transfer_us=h.times.transfer_us,
                finish_us=h.times.finish_us,
                plain_us=h.times.plain_us,
                needed_us=whole.needed_us if h.times.plain_us else 0.0,
                landing_bytes=h.landing_bytes,
                held_bytes=h.held_bytes,
                link=h.link,
                matmul_slowdown=h.times.matmul_slowdown,
                transfer_slowdown=h.times.transfer_slowdown,
            )
            for h in s.halves
        ]

    def _transfer(self, s: SplitCandidate, order: FusionOrder, moving: Mapping[Node, object]) -> Transfer:
        c = s.window.collective
        first, last = s.window.bounds(order, moving)
        return Transfer(
            group=c.group or "",
            earliest=first,
            latest=last,
            plain_at=order.position[c.node],
            starts_late=c.op is Op.ALL_GATHER and not s.by_order,
            start_us=s.times.start_us,
            transfer_us=s.times.transfer_us,
            finish_us=s.times.finish_us,
            plain_us=s.times.plain_us,
            landing_bytes=s.landing_bytes,
            held_bytes=s.held_bytes,
            needed_us=self.needed_us(s),
            is_required=s.is_required,
            link=_link(c),
            matmul_slowdown=s.times.matmul_slowdown,
            transfer_slowdown=s.times.transfer_slowdown,
        )

    def _without_copy(
        self, s: SplitCandidate, t: Transfer, order: FusionOrder, moving: Mapping[Node, object]
    ) -> Transfer | None:
        """Return the zero-copy form of a gather, None where the place of a reader is not known."""
        release, times = release_position(s.window, s.readers, order, moving), s.best_times
        if release is None:
            return None
        return replace(t, release=release, start_us=times.start_us, finish_us=times.finish_us, release_us=times.release_us)

    def _items(self, assignments: Sequence[Assignment], order: FusionOrder, split: set[int]) -> list[Item]:
        """Return the nodes in `order` with their times. A fused site has its time at its first node."""
        clock = dict(zip(self._plain_order.items, self._clock, strict=True))
        items = {n: Item(us) for n, us in clock.items()}
        for i, (candidate, assignment) in enumerate(zip(self.candidates, assignments, strict=True)):
            c = candidate.collective
            if (alternative := assignment.alternative) is not None:
                times = self.costs.times_us(alternative.site, alternative.choice, alternative.strategy)
                members = alternative.site.members
                us = times.us if times else sum(clock.get(m, 0.0) for m in members)
                for member in members:
                    items[member] = Item(0.0)
                busy = min(us, times.plain.communication_us) if times else 0.0
                items[min(members, key=order.position.__getitem__)] = Item(us, busy)
            elif i not in split and c.op is not None and c.group is not None and c.ranks > 1:
                shape = shape_of_site(Split(c), self.costs.hints) if c.wait is not None else None
                if shape is not None:
                    profile = self.costs.policy.profile(c.ranks, c.node.meta["val"].device.type)
                    us = split_times(shape, 0, profile).plain_us
                    items[c.node] = Item(us, us, _link(c))
        return [items[n] for n in order.items]

    def is_better_fused(self, i: int, placed: Mapping[int, Places], alternatives: Alternatives) -> bool:
        """Return whether one of all alternatives of a candidate saves more than splitting it does."""
        if self.splits[i].is_required:
            return False
        saved = _saved_us(placed.get(i, ()))
        return bool(alternatives.ranked) and alternatives.ranked[0].benefit > Benefit(0, 0, 0, saved)

    def choice(self, assignments: Sequence[Assignment], order: FusionOrder, placed: Mapping[int, Places]) -> SplitChoice:
        """Return the assignments with the placed collectives as split."""
        result, numbers = list(assignments), _ordinals(self.candidates, assignments, order, placed)
        choice = SplitChoice(result, order)
        for i, s in self.splits.items():
            places, alternatives = placed.get(i), assignments[i].alternatives
            if places is None:
                if (lost := _explain_loss(s, None)) and not s.is_required and not assignments[i].alternative:
                    result[i] = replace(assignments[i], result=lost)
                if s.is_required:
                    miss = Miss(
                        Reason.STRATEGY_ILLEGAL,
                        f"split needs one of {len(PLAN_SLOTS)} slots, and all are in use where it starts",
                    )
                    result[i] = replace(assignments[i], result=miss)
                continue
            p, saved = places[-1], _saved_us(places)
            is_exchange = s.window.collective.op is Op.ALL_TO_ALL
            concurrent = tuple(filter(is_compute, order.items[p.start : p.finish])) if is_exchange else ()
            halves = tuple(replace(h.half, slot=one.slot) for h, one in zip(s.halves or (), places, strict=bool(s.halves)))
            site = Split(s.window.collective, p.slot, p.release is not None, concurrent, halves)
            own = _as_choice(s, places)
            alternative = Alternative(site, s.strategy, saved, Benefit(0, 0, 0, saved), 0, own)
            result[i] = Assignment(alternatives, alternative, assignments[i].estimate)
            choice.windows[i] = _describe(s, places, [numbers[i, part] for part in range(len(places))])
            choice.entries[i, ""] = s.window, p
            if halves:
                choice.entries[i, FIRST_HALF] = replace(s.window, trail=()), places[0]
                choice.entries[i, ""] = replace(s.window, lead=()), p
            if s.is_inner:
                choice.inner.add(i)
        return choice


def _in_halves(splits: Mapping[int, SplitCandidate], kept: Collection[int]) -> dict[int, SplitCandidate]:
    """Return the collectives, of which only `kept` are placed in halves."""
    return {i: s if i in kept else replace(s, halves=None) for i, s in splits.items()}


def _saved_us(places: Places) -> float:
    return sum(p.saved_us for p in places)


def _describe(s: SplitCandidate, places: Places, numbers: Sequence[tuple[list[int], list[int]]]) -> SplitWindow:
    """Return the record of the places of one collective. `numbers`: as of _ordinals, for each place."""
    forms = s.halves or (s,)
    transports = [h.transport for h in s.halves] if s.halves else ["c10d" if s.window.collective.hosts > 1 else ""]
    window = None
    for form, transport, p, (shared, own) in zip(forms, transports, places, numbers, strict=True):
        (start_order, *finish_order), (starts, finishes, *releases) = shared, own
        window = SplitWindow(
            p.slot, start_order, starts, finishes, form.landing_bytes, round(form.times.transfer_us, 2),
            round(p.exposed_us, 2), transport, releases[0] if releases else None, finish_order[0] if finish_order else None,
            window,
        )  # fmt: skip
    assert window is not None
    return window


def _explain_loss(s: SplitCandidate, best_us: float | None) -> Miss | None:
    """Return why splitting an all_to_all does not pay; None for other collectives, whose fused forms have their own reasons.

    `best_us`: what it saves at most, where that is too little.
    """
    if s.window.collective.op is not Op.ALL_TO_ALL:
        return None
    saves = "it would have to wait where it is placed" if best_us is None else f"split saves {max(0.0, best_us):.0f} us at most"
    text = f"predicted us: none {s.times.plain_us:.0f}, split {s.times.shortest_us:.0f} if all is hidden; {saves}"
    return Miss(Reason.NO_GAIN, _with_assumption(text, s))


def _link(c: Collective) -> str:
    return PORT if c.hosts == 1 else NETWORK


def _as_choice(s: SplitCandidate, places: Places) -> StrategyChoice:
    """Return the predictions of a placed collective: plain, and the time that it takes from the graph."""
    saved, exposed = _saved_us(places), sum(p.exposed_us for p in places)
    us, transfer = s.times.plain_us - saved, sum(form.times.transfer_us for form in s.halves or (s,))
    plain = Prediction(s.times.plain_us, 0.0, s.times.plain_us)
    own = Prediction(us, 0.0, transfer)
    text = f"predicted us: none {plain.us:.0f}, {s.strategy} {us:.0f}, of which {exposed:.0f} waiting"
    predictions = {str(NONE): plain, str(s.strategy): own}
    return StrategyChoice(s.strategy, predictions, _with_assumption(text, s), saved, (NONE, s.strategy))


def _with_assumption(text: str, s: SplitCandidate) -> str:
    return "; ".join(filter(None, (text, s.times.assumed)))


def _ordinals(
    candidates: Sequence[Candidate], assignments: Sequence[Assignment], order: FusionOrder, placed: Mapping[int, Places]
) -> dict[tuple[int, int], tuple[list[int], list[int]]]:
    """Return for each placed collective, or half of one, two lists: the numbers of its ops among those whose order ranks share,
    and the numbers of all its ops among everything that communicates. Keys: the number of the candidate, and of the half.

    Ranks share the order of starts, of whole collectives, and of finishes that wait for finishes of other ranks. Where a rank
    has its other finishes is its own business, and so is how many other nodes lie in between.
    """
    events: list[tuple[tuple[int, int, int], tuple[int, int]]] = []
    for i, (candidate, assignment) in enumerate(zip(candidates, assignments, strict=True)):
        for part, p in enumerate(placed.get(i, ())):
            events += [((p.start, 0, p.start_number), (i, part)), ((p.finish, 0, p.finish_number), (i, part))]
            if p.release is not None:
                events.append(((p.release, 0, p.release_number), (i, part)))
        if i not in placed:
            site = assignment.site
            node = candidate.collective.node
            events.append(((order.span(node)[0] if site else order.position[node], 1, i), (i, 0)))
    ordered: dict[tuple[int, int], list[int]] = {}
    numbers: dict[tuple[int, int], list[int]] = {}
    count = 0
    for number, (_, key) in enumerate(sorted(events)):
        own = numbers.setdefault(key, [])
        own.append(number)
        if len(own) == 1 or (len(own) == 2 and finishes_together(candidates[key[0]].collective)):
            ordered.setdefault(key, []).append(count)
            count += 1
    return {key: (ordered[key], own) for key, own in numbers.items() if key[0] in placed}

"""Best cases, alternatives, places and worth of the collectives of one graph that may be split. choose.py decides by them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from torch.fx import Graph, Node

from ub_overlap.runtime.schedule.steps import PLAN_SLOTS

from ..cost.choice import MARGIN_US
from ..cost.profile import Profile
from ..cost.site_sizes import shape_of_site
from ..cost.split_time import split_times
from ..graph.compute import is_compute
from ..match import Candidate, Fused, Miss, Split
from ..match.collectives import Collective, Op
from ..match.fusion_order import FusionOrder
from ..match.site import FIRST_HALF
from ..match.window import Window, moving_nodes
from ..plan.decision import SplitWindow
from ..plan.reasons import Reason
from ..select.alternatives import Alternative, Alternatives
from ..select.assignment import Assignment
from ..select.benefit import NO_BENEFIT, Benefit, total_benefit
from ..select.profitability import SiteCosts
from .buckets import find_buckets, join_requested
from .hierarchy import shortest_us
from .landing_result import release_position
from .node_times import NodeTimes, next_to_collectives
from .placed_record import Places, choice_of, describe_window, explain_loss, number_ops, saved_us, share_of
from .placement import NETWORK, PORT, Item, Limits, Placed, Transfer, place
from .ring_slots import fix_slots
from .split_candidates import SplitCandidate

MARGIN = 0.05
"""The saving required of a split collective, as a share of the plain one."""


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
    buckets: dict[int, int] = field(default_factory=dict)
    """By the number of a candidate in a bucket: that of the first one, whose op sends them all."""


@dataclass(slots=True)
class SplitPlanner:
    """The windows of one graph. `splits`: by number of the candidate."""

    graph: Graph
    candidates: Sequence[Candidate]
    found: Sequence[Alternatives]
    costs: SiteCosts
    splits: dict[int, SplitCandidate]
    may_differ: bool
    """Whether other ranks may have another graph (ring_slots.py)."""
    _all: dict[int, SplitCandidate] = field(init=False)
    """All candidates alone, also those that are in no bucket yet."""
    _clock: list[float] = field(init=False)
    """Microseconds of the graph's nodes, in the order with nothing fused."""
    _plain_order: FusionOrder = field(init=False)
    """The order with nothing fused."""
    _firsts: dict[int, int] = field(init=False)
    """By the number of a candidate: that of the one in `splits` which stands for it."""
    _set_aside_us: dict[int, float] = field(default_factory=dict)
    """What the alternatives of a candidate were reduced by."""

    def __post_init__(self) -> None:
        untimed = next_to_collectives(self.graph, [(c.collective, c.match) for c in self.candidates])
        times = NodeTimes.of(self.graph, self._profile(), self.costs.hints, untimed, only_compute=self.may_differ)
        self._plain_order = FusionOrder(self.graph)
        self._clock = [times.us(n) for n in self._plain_order.items]
        self._all = self.splits
        if self.may_differ:  # ranks with other graphs could not agree on buckets
            self.splits = {i: s for i, s in self._all.items() if s.may_be_alone}
        else:
            self.splits = join_requested(self._all, self.costs)
        self._firsts = {i: s.number for s in self.splits.values() for i in s.numbers}
        for i, s in self.splits.items():
            if s.halves is not None and not self._is_faster_in_halves(s):
                self.splits[i] = replace(s, halves=None)

    def _profile(self) -> Profile:
        """Return the profile of the first window."""
        c = next(iter(self.splits.values())).window.collective
        return self.costs.policy.profile(c.ranks, c.node.meta["val"].device.type)

    def needed_us(self, s: SplitCandidate) -> float:
        return max(MARGIN_US, MARGIN * s.times.plain_us)

    @property
    def may_join(self) -> bool:
        """Whether some collectives may be sent in a bucket."""
        return not self.may_differ and sum(s.may_share and not s.is_required for s in self._all.values()) > 1

    def find_buckets(self, assignments: Sequence[Assignment], order: FusionOrder, mixed: bool) -> list[SplitCandidate]:
        """Return the buckets of collectives that are alone: as split collectives, as kernels of few tokens, or plain.

        `mixed`: large and small ones may be in one bucket.
        """

        def is_free(s: SplitCandidate) -> bool:
            site = assignments[s.number].site
            return (site is None or isinstance(site, Fused)) and s.halves is None

        alone = {i: self.splits.get(i, s) for i, s in self._all.items() if not s.is_required}
        free = [s for s in alone.values() if s.may_share and not s.bucket and is_free(s)]
        moving = moving_nodes(s.window for s in (*self.splits.values(), *free))
        bounds = {s.number: s.window.bounds(order, moving) for s in free}
        split = {i for s in self.splits.values() for i in s.numbers} | bounds.keys()
        items = self._items(assignments, order, split)
        until = [0.0, *accumulate(max(0.0, item.us - item.link_us) for item in items)]
        return find_buckets(free, bounds, until, self.costs, mixed)

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
        first = self._firsts.get(i, i)
        if first not in self.splits:
            return alternatives
        s = self.splits[first]
        best = self.best_us(s)
        if not s.is_required and best < self.needed_us(s):
            del self.splits[i]
            return (
                alternatives if alternatives.ranked else replace(alternatives, miss=explain_loss(s, best) or alternatives.miss)
            )
        self._set_aside_us[i] = best
        reduced = [replace(a, benefit=a.benefit.plus_us(-best)) for a in alternatives.ranked]
        return replace(alternatives, ranked=[a for a in reduced if a.benefit > NO_BENEFIT and not s.is_required])

    def _benefits(self, s: SplitCandidate) -> list[Benefit]:
        """Return the benefits of the best alternatives of the collectives that `s` stands for."""
        return [self.found[i].ranked[0].benefit for i in s.numbers if self.found[i].ranked]

    def place(self, assignments: Sequence[Assignment], order: FusionOrder) -> dict[int, Places]:
        """Return the places of the windows that other sites leave open.

        Halves need more slots and memory than one collective. So all are also placed as one, and then those in halves that
        saved more so. What saves most together is kept, from then on.
        """
        is_open = [a.alternative is None for a in assignments]
        open_splits = {i: s for i, s in self.splits.items() if all(is_open[k] for k in s.numbers)}
        if not open_splits:
            return {}
        items = self._items(assignments, order, {i for s in open_splits.values() for i in s.numbers})
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
            kept = {i for i in halves & placed.keys() if saved_us(placed[i]) > saved_us(whole.get(i, ()))}
        if kept != halves:
            tried.append((kept, self._place(items, _in_halves(open_splits, kept), order)))
        kept, placed = max(tried, key=lambda one: self._worth(one[1]))
        self.splits |= _in_halves(open_splits, kept)
        return placed

    def worth(self, assignments: Sequence[Assignment], placed: Mapping[int, Places], reduced: Collection[int]) -> Benefit:
        """Return what all that is fused and placed saves together. `reduced`: candidates whose alternatives are reduced."""
        fused = [
            a.alternative.benefit.plus_us(self._set_aside_us[i] if i in reduced else 0.0)
            for i, a in enumerate(assignments)
            if a.alternative is not None
        ]
        required, us = self._worth(placed)
        return total_benefit([*fused, Benefit(required, 0, 0, us)])

    def _worth(self, placed: Mapping[int, Places]) -> tuple[int, float]:
        """Return the number of required collectives that are placed, and what all save."""
        return sum(self.splits[i].is_required for i in placed), sum(map(saved_us, placed.values()))

    def joined(self, numbers: Iterable[int]) -> set[int]:
        """Return the collectives that are sent in the buckets of those of `numbers`."""
        return {k for i in numbers for k in self.splits[i].numbers[1:]}

    def _place(self, items: Sequence[Item], open_splits: Mapping[int, SplitCandidate], order: FusionOrder) -> dict[int, Places]:
        moving = moving_nodes(s.window for s in open_splits.values())
        splits = [s for s in open_splits.values() if not s.bucket or s.window.is_open(order, moving)]
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

    def is_better_fused(self, s: SplitCandidate, placed: Mapping[int, Places]) -> bool:
        """Return whether the best of all alternatives save more than splitting does."""
        fused, saved = self._benefits(s), saved_us(placed.get(s.number, ()))
        return bool(fused) and not s.is_required and total_benefit(fused) > Benefit(0, 0, 0, saved)

    def choice(self, assignments: Sequence[Assignment], order: FusionOrder, placed: Mapping[int, Places]) -> SplitChoice:
        """Return the assignments with the placed collectives as split."""
        result, numbers = list(assignments), number_ops(self.candidates, assignments, order, placed, self.joined(placed))
        choice = SplitChoice(result, order)
        for i, s in self.splits.items():
            places = placed.get(i)
            if places is None:
                if (lost := explain_loss(s, None)) and not s.is_required and not assignments[i].alternative:
                    result[i] = replace(assignments[i], result=lost)
                if s.is_required:
                    miss = Miss(
                        Reason.STRATEGY_ILLEGAL,
                        f"split needs one of {len(PLAN_SLOTS)} slots, and all are in use where it starts",
                    )
                    result[i] = replace(assignments[i], result=miss)
                continue
            p = places[-1]
            is_exchange = s.window.collective.op is Op.ALL_TO_ALL
            concurrent = tuple(filter(is_compute, order.items[p.start : p.finish])) if is_exchange else ()
            halves = tuple(replace(h.half, slot=one.slot) for h, one in zip(s.halves or (), places, strict=bool(s.halves)))
            orders = [numbers[i, part] for part in range(len(places))]
            others = tuple(m.window.collective for m in s.bucket[1:])
            for m in s.members:
                bucket = others if m.number == i else ()
                site = Split(m.window.collective, p.slot, p.release is not None, concurrent, halves, bucket)
                own, saved = choice_of(s, places, m), saved_us(places) * share_of(m, s)
                alternative = Alternative(site, s.strategy, saved, Benefit(0, 0, 0, saved), 0, own)
                before = assignments[m.number]
                result[m.number] = Assignment(before.alternatives, alternative, before.estimate)
                choice.windows[m.number] = describe_window(s, places, orders, m)
                if s.bucket:
                    choice.buckets[m.number] = i
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


def _link(c: Collective) -> str:
    return PORT if c.hosts == 1 else NETWORK

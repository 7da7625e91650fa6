"""Place the ops of split collectives between the items of a graph, in its order.

A list scheduler with one resource for each link: the GPU's port, and the network. It takes plain numbers, so that every rank
computes the same.

    items      what the graph computes, in order: microseconds, and microseconds of a link that fused and plain sites take
    transfers  windows: a start stands before an item from `earliest` on, its finish before the item `latest` at the latest

Gathers are placed backwards from their readers: each starts as late as it still arrives in time. Reductions start as soon as
they are ready, and finish once their data is here. A link serves one transfer after the other, in the order of their starts,
and a fused site waits for what was started before it. Every open transfer has a slot of landing memory; slots keep their
memory, so a transfer prefers one that is large enough. A start waits until the peers have left its slot, so it also prefers
one that has been free for a while. A start without a free slot or without memory waits for the next finish.

A hierarchical collective is two transfers: the second sends the result of the first, so it starts behind the first's finish.
Both are placed, or none. Of a gather the second is placed first, and the first arrives where the second starts.

A zero-copy gather has its slot until its release. Where a start finds no slot or memory for that reason, the gather that is
read for longest is copied instead, if all transfers save more together then.

Large transfers may find the memory taken by small ones, whose slots stay. Then memory is also reserved for them, and the
arrangement that saves more is taken.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

SLACK = 0.25
SLACK_US = 50.0
"""A gather starts this share of its transfer, and these microseconds, earlier than it must: predictions have errors."""
REST_US = 100.0
"""A slot that has been free for this long is free on the peers as well: ranks are that far apart at most, mostly."""
PORT, NETWORK = "port", "network"
"""Links: of a GPU to those of its host, and between hosts. Collectives of c10d across hosts share the network."""
ROUNDS = 4
"""Transfers that save too little are left out, and the others are placed again, this often at most."""


@dataclass(frozen=True, slots=True)
class Item:
    """One node, or one fused site."""

    us: float
    link_us: float = 0.0
    """The part of `us` that `link` is busy."""
    link: str = PORT


@dataclass(frozen=True, slots=True)
class Transfer:
    """One collective that may be split. Times are in microseconds."""

    group: str
    earliest: int
    latest: int
    plain_at: int
    """The item at which the plain collective runs."""
    starts_late: bool
    """A gather: it is placed backwards from `latest`."""
    start_us: float
    transfer_us: float
    finish_us: float
    plain_us: float
    landing_bytes: int
    """Landing memory, which the slot keeps."""
    held_bytes: int = 0
    """Bytes of its input, which lives from start to finish."""
    needed_us: float = 0.0
    """The least saving with which it is placed."""
    is_required: bool = False
    """Placed whatever it saves, as the user requests."""
    link: str = PORT
    matmul_slowdown: float = 0.0
    """Slowdown of matmuls during the transfer."""
    transfer_slowdown: float = 0.0
    """Slowdown of the transfer during matmuls."""
    release: int | None = None
    """The item before which the result of a zero-copy gather may be released; None: its finish frees the slot."""
    release_us: float = 0.0
    first_half: int | None = None
    """Of the second half of a hierarchical collective: the number of the first, whose result it sends."""
    slot: int | None = None
    """The slot of a transfer that is placed by order alone: it starts at `earliest` and finishes at `latest`, so that the
    clock, which may differ between ranks, changes nothing that they share. No other transfer of the group takes the slot."""


@dataclass(frozen=True, slots=True)
class Limits:
    """`bytes`: landing memory and held inputs together. `slots`: of one group."""

    bytes: int
    slots: int
    reserved: int = 0
    """The part of `bytes` that only `large` may use."""
    large: frozenset[int] = frozenset()
    """Numbers of transfers."""


@dataclass(frozen=True, slots=True)
class Placed:
    """Start, finish and release stand before the items at these positions. Entries of one position run by rising number."""

    start: int
    start_number: int
    finish: int
    finish_number: int
    slot: int
    exposed_us: float
    """The time that the finish waits."""
    saved_us: float
    """Against the plain collective."""
    release: int | None = None
    release_number: int = 0
    delays_us: float = 0.0
    """The time for which collectives at their places wait for it. It is no part of `saved_us`."""


def place(
    items: Sequence[Item], transfers: Sequence[Transfer], limits: Limits, zero_copy: Mapping[int, Transfer] | None = None
) -> list[Placed | None]:
    """Return the place of each transfer, None for one that saves less than it needs or finds no slot or memory.

    `zero_copy`: by number of the transfer, its form without a copy, where it has one.
    """
    lacking_memory: set[int] = set()
    best, best_us = _place_forms(transfers, items, limits, zero_copy or {}, lacking_memory)
    if lacking_memory:
        most = max(transfers[k].landing_bytes + transfers[k].held_bytes for k in lacking_memory)
        limits = replace(limits, reserved=most, large=frozenset(lacking_memory))
        chosen, us = _place_forms(transfers, items, limits, zero_copy or {}, set())
        best = chosen if us > best_us else best
    return _largest_slots_first(best, transfers)


def _place_forms(
    transfers: Sequence[Transfer],
    items: Sequence[Item],
    limits: Limits,
    zero_copy: Mapping[int, Transfer],
    lacking_memory: set[int],
) -> tuple[list[Placed | None], tuple[int, float]]:
    """Return the places, with as many zero-copy gathers as save most, and what they are worth. Adds to `lacking_memory`."""
    forms = dict(zero_copy)
    best, best_us = _place([forms.get(k, t) for k, t in enumerate(transfers)], items, limits, blocking := set(), lacking_memory)
    for _ in range(ROUNDS):
        if not blocking:
            break
        forms = {k: t for k, t in forms.items() if k not in blocking}
        chosen, us = _place([forms.get(k, t) for k, t in enumerate(transfers)], items, limits, blocking := set(), set())
        if us > best_us:
            best, best_us = chosen, us
    return best, best_us


def _largest_slots_first(places: Sequence[Placed | None], transfers: Sequence[Transfer]) -> list[Placed | None]:
    """Return the places with the slots of each group numbered by size. Graphs share slots: then few of them grow again."""
    sizes: dict[str, dict[int, int]] = {}
    for p, t in zip(places, transfers, strict=True):
        if p is not None:
            of_group = sizes.setdefault(t.group, {})
            of_group[p.slot] = max(of_group.get(p.slot, 0), t.landing_bytes)
    numbers = {
        group: {slot: number for number, slot in enumerate(sorted(slots, key=lambda slot, slots=slots: (-slots[slot], slot)))}
        for group, slots in sizes.items()
    }
    return [None if p is None else replace(p, slot=numbers[t.group][p.slot]) for p, t in zip(places, transfers, strict=True)]


def _place(
    transfers: Sequence[Transfer], items: Sequence[Item], limits: Limits, blocking: set[int], lacking_memory: set[int]
) -> tuple[list[Placed | None], tuple[int, float]]:
    """Return the places, and what they are worth: required transfers among them, and microseconds saved.

    Adds to `blocking` the zero-copy gathers for whose slot or memory others had to wait, and to `lacking_memory` those that
    found no memory at some moment and were not placed.
    """
    pairs = _pairs(transfers)
    active = set(range(len(transfers)))
    placed: dict[int, Placed] = {}
    for _ in range(ROUNDS):
        sweep = _Sweep(items, transfers, active, limits)
        placed = sweep.run()
        blocking |= sweep.blocking
        lacking_memory |= sweep.lacking_memory - placed.keys()
        worse = {k for pair in pairs if pair[0] in active and not _is_worth(pair, transfers, placed) for k in pair}
        if not worse:
            break
        active -= worse
    result = [placed[k] if k in active and k in placed else None for k in range(len(transfers))]
    required = sum(p is not None and t.is_required for p, t in zip(result, transfers, strict=True))
    return result, (required, sum(p.saved_us for p in result if p is not None))


def _pairs(transfers: Sequence[Transfer]) -> list[tuple[int, ...]]:
    """Return the numbers of the transfers that are placed together or not at all."""
    seconds = {t.first_half: k for k, t in enumerate(transfers) if t.first_half is not None}
    return [(k, seconds[k]) if k in seconds else (k,) for k, t in enumerate(transfers) if t.first_half is None]


def _is_worth(pair: tuple[int, ...], transfers: Sequence[Transfer], placed: Mapping[int, Placed]) -> bool:
    """Return whether all of `pair` are placed and save enough together."""
    if not all(k in placed for k in pair):
        return False
    saved, needed = sum(placed[k].saved_us for k in pair), sum(transfers[k].needed_us for k in pair)
    return saved >= needed or transfers[pair[0]].is_required


@dataclass(slots=True)
class _Open:
    start: int
    number: int
    slot: int
    end_us: float
    """When its data is here."""
    delays_us: float = 0.0
    """The time for which collectives at their places wait for it on their link."""


@dataclass(slots=True)
class _Sweep:
    """One sweep over the items with the transfers of `active`; the others run plainly."""

    items: Sequence[Item]
    transfers: Sequence[Transfer]
    active: set[int]
    limits: Limits
    now: float = 0.0
    link_free: dict[str, float] = field(default_factory=lambda: {PORT: 0.0, NETWORK: 0.0})
    """When each link has served what was started."""
    number: int = 0
    held: int = 0
    slots: dict[str, list[int]] = field(default_factory=dict)
    """Bytes of the slots of each group."""
    left: dict[tuple[str, int], float] = field(default_factory=dict)
    """When a slot of a group was last left."""
    open: dict[int, _Open] = field(default_factory=dict)
    unreleased: dict[int, _Open] = field(default_factory=dict)
    """Zero-copy gathers between finish and release."""
    blocking: set[int] = field(default_factory=set)
    """Those of them for whose slot or memory a start had to wait: of each such moment the one that is read for longest."""
    lacking_memory: set[int] = field(default_factory=set)
    """Transfers that found no memory at some moment, and would fit alone."""
    large_bytes: int = 0
    """What `limits.large` use: their slots and held inputs."""
    placed: dict[int, Placed] = field(default_factory=dict)
    latest: dict[int, int] = field(default_factory=dict)
    """The last position of each finish. A gather's first half finishes where its second half starts."""

    def run(self) -> dict[int, Placed]:
        items = _with_plain(self.items, [t for k, t in enumerate(self.transfers) if k not in self.active])
        ready: dict[int, list[int]] = {}
        due: dict[int, list[int]] = {}
        starts = _latest_starts(items, {k: self.transfers[k] for k in sorted(self.active) if self.transfers[k].starts_late})
        self.latest = {k: self.transfers[k].latest for k in sorted(self.active)}
        self.latest |= {first: starts[k] for k in starts if (first := self.transfers[k].first_half) is not None}
        for k, end in self.latest.items():
            ready.setdefault(starts.get(k, self.transfers[k].earliest), []).append(k)
            due.setdefault(end, []).append(k)
        waiting: list[int] = []
        for position, item in enumerate(items):
            ends = due.get(position, ())
            self.release_all(position)
            self.finish_all([k for k in ends if k in self.open], position)
            if item.us:
                self.finish_all([k for k, o in self.open.items() if self.is_here(k, o)], position)
            if position in ready:
                waiting = sorted([*waiting, *ready[position]], key=self.urgency)
            waiting = [k for k in waiting if not self.start(k, position)]
            self.finish_all([k for k in ends if k in self.open], position)
            if any(self.is_second(k) for k in waiting):  # its first half may have just finished
                waiting = [k for k in waiting if not (self.is_second(k) and self.start(k, position))]
                self.finish_all([k for k in ends if k in self.open], position)
            waiting = [k for k in waiting if position < self.latest[k]]
            self.advance(item)
        return self.placed

    def is_second(self, k: int) -> bool:
        return self.transfers[k].first_half is not None

    def urgency(self, k: int) -> tuple[int, int]:
        t = self.transfers[k]
        return (self.latest[k] if t.starts_late else len(self.items) + t.earliest, k)

    def is_here(self, k: int, o: _Open) -> bool:
        t = self.transfers[k]
        return not t.starts_late and t.slot is None and o.end_us + SLACK * t.transfer_us + SLACK_US <= self.now

    def start(self, k: int, position: int) -> bool:
        """Start a transfer if there is a slot and memory. A start in front of its own finish hides nothing."""
        t = self.transfers[k]
        if position == self.latest[k] and not t.is_required:
            return False
        if t.first_half is not None and t.first_half not in self.placed:
            return False
        slot = self.find_slot(k)
        if slot is None:
            self.blocking.update(sorted(self.unreleased, key=lambda k: (self.transfers[k].release or 0, k))[-1:])
            return False
        sizes = self.slots.setdefault(t.group, [])
        sizes += [0] * (slot + 1 - len(sizes))
        if k in self.limits.large:
            self.large_bytes += max(0, t.landing_bytes - sizes[slot]) + t.held_bytes
        sizes[slot] = max(sizes[slot], t.landing_bytes)
        self.held += t.held_bytes
        self.now += t.start_us
        end = max(self.now, self.link_free[t.link]) + t.transfer_us * (1 + t.transfer_slowdown)
        self.link_free[t.link] = end
        self.open[k] = _Open(position, self.next_number(), slot, end)
        return True

    def find_slot(self, k: int) -> int | None:
        """Return a free slot, None without one, or without memory.

        First come slots that the peers have left, then those that grow least, of these the smallest."""
        t = self.transfers[k]
        sizes = self.slots.get(t.group, [])
        used = {o.slot for k, o in (*self.open.items(), *self.unreleased.items()) if self.transfers[k].group == t.group}
        if t.slot is not None:
            return None if t.slot in used else t.slot
        fixed = {other.slot for other in self.transfers if other.group == t.group}
        free = [slot for slot in range(min(len(sizes) + len(fixed) + 1, self.limits.slots)) if slot not in used | fixed]
        room = self.limits.bytes - sum(map(sum, self.slots.values())) - self.held - t.held_bytes
        if k not in self.limits.large:
            room -= max(0, self.limits.reserved - self.large_bytes)
        found: list[tuple[bool, int, int, int]] = []
        for slot in free:
            size = sizes[slot] if slot < len(sizes) else 0
            growth = max(0, t.landing_bytes - size)
            if growth <= room or t.is_required:
                found.append((self.is_resting(t.group, slot), growth, size + growth, slot))
        if free and not found and t.landing_bytes + t.held_bytes <= self.limits.bytes:
            self.lacking_memory.add(k)
        return min(found)[-1] if found else None

    def is_resting(self, group: str, slot: int) -> bool:
        """Return whether peers may still be in the last call of this slot."""
        left = self.left.get((group, slot))
        return left is not None and self.now < left + REST_US

    def finish_all(self, keys: list[int], position: int) -> None:
        for k in sorted(keys, key=lambda k: self.open[k].number):
            t, o = self.transfers[k], self.open.pop(k)
            slow = 1 + t.transfer_slowdown
            exposed = max(0.0, o.end_us - self.now)
            exposed -= min(exposed, slow * t.transfer_us) * (1 - 1 / slow)  # no matmul slows the part that is waited for
            self.now += exposed + t.finish_us
            self.held -= t.held_bytes
            self.large_bytes -= t.held_bytes if k in self.limits.large else 0
            self.left[t.group, o.slot] = self.now
            slowed = t.matmul_slowdown * max(0.0, t.transfer_us - exposed)
            saved = t.plain_us - t.start_us - t.finish_us - t.release_us - exposed - slowed
            finish = position, self.next_number()
            self.placed[k] = Placed(o.start, o.number, *finish, o.slot, exposed, saved, delays_us=o.delays_us)
            if t.release is not None:
                self.unreleased[k] = o
        self.release_all(position)

    def release_all(self, position: int) -> None:
        """Release the results whose last readers stand before `position`."""
        for k, o in list(self.unreleased.items()):
            t = self.transfers[k]
            assert t.release is not None
            if t.release <= position:
                del self.unreleased[k]
                self.now += t.release_us
                self.left[t.group, o.slot] = self.now
                self.placed[k] = replace(self.placed[k], release=position, release_number=self.next_number())

    def next_number(self) -> int:
        self.number += 1
        return self.number

    def advance(self, item: Item) -> None:
        end = self.now + item.us
        if item.link_us:
            self.link_free[item.link] = max(self.link_free[item.link], self.now) + item.link_us
            in_front = [o for k, o in self.open.items() if self.transfers[k].link == item.link]
            if in_front and self.link_free[item.link] > end:
                last = max(in_front, key=lambda o: (o.end_us, o.number))
                last.delays_us += min(self.link_free[item.link] - end, max(0.0, last.end_us - self.now))
            end = max(end, self.link_free[item.link])
        self.now = end


def _with_plain(items: Sequence[Item], plain: Sequence[Transfer]) -> list[Item]:
    """Return the items with the collectives that are not split at their places."""
    result = list(items)
    for t in plain:
        if not t.plain_us:  # a half whose other half counts
            continue
        old = result[t.plain_at]
        busy = old.link_us if old.link == t.link else 0.0
        result[t.plain_at] = Item(old.us + t.plain_us, busy + t.plain_us, t.link)
    return result


def _latest_starts(items: Sequence[Item], gathers: dict[int, Transfer]) -> dict[int, int]:
    """Return for each gather the last position from which it arrives in time, the later gathers and its link given.

    The first half of a hierarchical gather arrives where the second one starts, over the other link.
    """
    starts: dict[int, int] = {}
    seconds = {t.first_half: k for k, t in gathers.items() if t.first_half is not None}

    def latest(k: int) -> int:
        return starts[seconds[k]] if k in seconds else gathers[k].latest

    for link in sorted({t.link for t in gathers.values()}, key=lambda link: link == NETWORK):
        # The microseconds that the link is free up to the begin of each item. Within an item the link is busy first.
        free = [0.0, *accumulate(max(0.0, i.us - (i.link_us if i.link == link else 0.0)) for i in items)]
        until = free[-1]
        for k in sorted((k for k, t in gathers.items() if t.link == link), key=lambda k: (-latest(k), -k)):
            t, end = gathers[k], latest(k)
            until = min(until, free[end]) - t.transfer_us * (1 + SLACK) - SLACK_US - t.finish_us
            at = bisect_right(free, until) - 1 if until >= 0 else 0
            starts[k] = max(t.earliest, min(at, end))
    return starts

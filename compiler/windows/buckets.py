"""Buckets: gathers of parameters, and reductions of gradients, that are sent as one split collective.

    shards of norms        -> cat -+                      +-> N slices
    shard of a weight      --------+-> one gather in parts +-> the weight
    shard of a weight      --------+                      +-> the weight

A bucket has the fixed steps of one collective: begin, waits and end. Its parts (match/bucket_parts.py) are pushed, copied and
summed one by one. A bucket of one part is an ordinary split collective, one of several parts a coalesced one.

A bucket of large gathers whose results may all stay in landing memory is zero-copy (windows/landing_result.py). It holds no
others: nothing of it is released before the last reader of all.

A bucket holds collectives of one kind and group. Gathers are ordered by their first readers, reductions by the nodes that make
their data ready. Neighbors are joined, the nearest in time first, as long as the time that both have in common hides the
transfer of all, and the bytes are within the limits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from ..cost.profile import Profile
from ..cost.site_shape import SiteShape
from ..cost.site_sizes import shape_of_site
from ..cost.split_time import SplitTimes, coalesced_times
from ..match.bucket_parts import bucket_parts, is_copied, types_of
from ..match.collectives import Op
from ..match.site import Split
from ..select.peak_memory import is_fused
from ..select.profitability import SiteCosts
from .split_candidates import SplitCandidate

MOST_COPIED_BYTES = 4 << 20
"""Landing memory at most of what is copied into a bucket."""
MOST_BYTES = 256 << 20
"""Landing memory and inputs of a bucket at most: the attention weights of a layer, or two of three feed-forward weights."""
MOST_HELD_US = 4000.0
"""The time at most for which a bucket holds a large result in front of its first reader, or a large gradient that is ready."""

Bounds = Mapping[int, tuple[int, int]]
"""By number of the candidate: the positions between which it may start and finish."""


def join_requested(splits: Mapping[int, SplitCandidate], costs: SiteCosts) -> dict[int, SplitCandidate]:
    """Return the candidates with those of a saved plan in its buckets, each at the number of its first.

    What is in no bucket and may not be split alone is left out.
    """
    requested: dict[str, list[SplitCandidate]] = {}
    for s in splits.values():
        if s.requested_bucket:
            requested.setdefault(s.requested_bucket, []).append(s)
    result = {i: s for i, s in splits.items() if s.may_be_alone}
    for members in requested.values():
        if len(members) > 1 and len(kinds := {_class_of(m, may_coalesce=True) for m in members}) == 1 and None not in kinds:
            bucket = _join(members, costs)
            result = {i: s for i, s in result.items() if i not in bucket.numbers} | {bucket.number: bucket}
    return dict(sorted(result.items()))


def find_buckets(
    splits: Iterable[SplitCandidate], bounds: Bounds, until_us: Sequence[float], costs: SiteCosts, mixed: bool
) -> list[SplitCandidate]:
    """Return buckets of neighbors among `splits`.

    `until_us`: by position, the time in front without transfers. `mixed`: large and small ones may be in one bucket.
    """
    limits = _Limits(until_us, min(MOST_BYTES, costs.policy.split_bytes // 2))  # the next bucket may be in flight then
    classes: dict[tuple[Any, ...], list[_Group]] = {}
    for s in splits:
        key, alone = _class_of(s, costs.policy.may_coalesce), _Group.of(s, *bounds[s.number])
        if key is not None and (s.is_small or costs.policy.may_coalesce) and limits.allow(alone):
            classes.setdefault((*key, _may_stay(s), mixed or is_copied(s.window.collective)), []).append(alone)
    groups = [group for alike in classes.values() for group in _join_neighbors(alike, limits)]
    return [_join(group.members, costs) for group in groups if len(group.members) > 1]


def _class_of(s: SplitCandidate, may_coalesce: bool) -> tuple[Any, ...] | None:
    """Return what collectives of a bucket have in common; None for one that is sent alone.

    Across hosts c10d runs each tensor as a collective of its own. So a bucket has one part there.
    """
    c = s.window.collective
    has_one_part = c.hosts > 1 or not may_coalesce
    if has_one_part and not is_copied(c):
        return None
    return c.op, c.group, c.reduce_op, s.strategy, types_of(c) if has_one_part else None


def _may_stay(s: SplitCandidate) -> bool:
    """Return whether the result may stay in landing memory, and is sent from its place."""
    return s.zero_copy_times is not None and not is_copied(s.window.collective)


@dataclass(frozen=True, slots=True)
class _Limits:
    until_us: Sequence[float]
    most_bytes: int

    def allow(self, group: _Group) -> bool:
        """Return whether the bytes are within the limits, and the transfers are hidden."""
        if group.first >= group.last or group.bytes > self.most_bytes or group.copied_bytes > MOST_COPIED_BYTES:
            return False
        begin, *others = (self.until_us[p] for p in (group.place, *group.large_places))
        hidden = self.until_us[group.last] - self.until_us[group.first]
        return hidden >= group.transfer_us and all(abs(at - begin) <= MOST_HELD_US for at in others)


@dataclass(frozen=True, slots=True)
class _Group:
    """Collectives that may be sent together. `first`, `last`: the positions between which all may start and finish."""

    members: tuple[SplitCandidate, ...]
    first: int
    last: int
    large_places: tuple[int, ...]
    """The places of those that are not copied."""

    @classmethod
    def of(cls, s: SplitCandidate, first: int, last: int) -> _Group:
        alone = cls((s,), first, last, ())
        return alone if is_copied(s.window.collective) else replace(alone, large_places=(alone.place,))

    @property
    def place(self) -> int:
        """The position in front of the first reader of gathers, or where reductions may start."""
        return self.last if self.members[0].window.collective.op is Op.ALL_GATHER else self.first

    @property
    def bytes(self) -> int:
        """Landing memory and inputs."""
        return sum(s.landing_bytes + s.held_bytes for s in self.members)

    @property
    def copied_bytes(self) -> int:
        return sum(s.landing_bytes for s in self.members if is_copied(s.window.collective))

    @property
    def transfer_us(self) -> float:
        """About the time of the transfer. What is copied together has the latency of one, the smallest."""
        copied = [s.times.transfer_us for s in self.members if is_copied(s.window.collective)]
        latency = (len(copied) - 1) * min(copied) if copied else 0.0
        return sum(s.times.transfer_us for s in self.members) - latency

    def with_next(self, other: _Group) -> _Group:
        first, last = max(self.first, other.first), min(self.last, other.last)
        return _Group((*self.members, *other.members), first, last, (*self.large_places, *other.large_places))


def _join_neighbors(alone: Sequence[_Group], limits: _Limits) -> list[_Group]:
    """Return the groups of collectives of one class, which are `alone` before."""
    groups = sorted(alone, key=lambda group: (group.place, group.members[0].number))
    times = [limits.until_us[group.place] for group in groups]
    gaps = [(round(after - before), i) for i, (before, after) in enumerate(pairwise(times))]
    group_of = list(range(len(groups)))
    for _, i in sorted(gaps):
        left, right = group_of[i], group_of[i + 1]
        both = groups[left].with_next(groups[right])
        if limits.allow(both):
            groups[left] = both
            group_of[i + 1 :] = [left if g == right else g for g in group_of[i + 1 :]]
    return [groups[g] for g in dict.fromkeys(group_of)]


def _join(members: Sequence[SplitCandidate], costs: SiteCosts) -> SplitCandidate:
    """Return the candidate of a bucket."""
    ordered = sorted(members, key=lambda s: s.number)
    head, may_stay = ordered[0], all(map(_may_stay, members))
    return replace(
        head,
        window=replace(head.window, bucket=tuple(s.window for s in ordered[1:])),
        times=_times(ordered, costs, zero_copy=False),
        landing_bytes=sum(s.landing_bytes for s in ordered),
        held_bytes=sum(s.held_bytes for s in ordered),
        halves=None,
        readers=tuple(dict.fromkeys(n for s in ordered for n in s.readers)) if may_stay else (),
        zero_copy_times=_times(ordered, costs, zero_copy=True) if may_stay else None,
        bucket=tuple(ordered),
    )


def _times(members: Sequence[SplitCandidate], costs: SiteCosts, zero_copy: bool) -> SplitTimes:
    """Return the times of a bucket: the fixed steps of one collective, the other steps of each part, and its copies."""
    c = members[0].window.collective
    profile = costs.policy.profile(c.ranks, c.node.meta["val"].device.type)
    parts = [[members[i] for i in part] for part in bucket_parts([s.window.collective for s in members])]
    priced = [_price_part(part, profile, costs) for part in parts]
    times = coalesced_times(tuple(shape for shape, _, _ in priced), members[0].strategy.chunks, profile, zero_copy)
    return replace(
        times,
        plain_us=sum(s.times.plain_us for s in members),
        start_us=times.start_us + sum(us for _, us, _ in priced),
        finish_us=times.finish_us + sum(us for _, _, us in priced),
    )


def _price_part(part: Sequence[SplitCandidate], profile: Profile, costs: SiteCosts) -> tuple[SiteShape, float, float]:
    """Return the sizes of a part as one tensor, and the microseconds of copies into it and out of it.

    One kernel copies all parameters into it, with their casts, but one kernel each gradient. The slice of a gather is copied
    for readers that are not compiled; one of a reduction is a view.
    """
    shapes = [shape_of_site(Split(s.window.collective), costs.hints) for s in part]
    known = [shape for shape in shapes if shape is not None]
    assert len(known) == len(part), "a member of a bucket has no size"
    if len(part) == 1:
        return known[0], 0.0, 0.0
    c = part[0].window.collective
    joined = replace(known[0], rows=sum(shape.rows * shape.cols for shape in known), cols=1)
    sent = joined.whole_bytes / (c.ranks if c.op is Op.ALL_GATHER else 1)
    kernels = 0 if c.op is Op.ALL_GATHER else len(part) - 1
    pairs = zip(part, known, strict=True) if c.op is Op.ALL_GATHER else ()
    copied = [shape.whole_bytes for s, shape in pairs if not all(map(is_fused, s.window.readers))]
    copy_in_us = _copy_us(sent, profile) + kernels * profile.compute.launch_us
    return joined, copy_in_us, sum(_copy_us(size, profile) for size in copied)


def _copy_us(size: float, profile: Profile) -> float:
    """Return the time of a compiled kernel that copies `size` bytes."""
    return profile.compute.launch_us + 2 * size / (profile.compute.memory_gbs * 1e3)

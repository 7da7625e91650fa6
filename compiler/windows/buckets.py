"""Buckets: small gathers of parameters, and small reductions of gradients, as one split collective.

    shards of N parameters  -> cat -> one gather    -> N slices
    gradients of N tensors  -> cat -> one reduction -> N slices

The parameters of norms and biases are below the threshold of the options: the fixed steps of a collective take longer than
their bytes. A bucket has these steps once. In a compiled graph the cat is one kernel with the casts in front of it.

A bucket holds collectives of one kind, group and type that nothing else would overlap. Gathers are taken in the order in which
their results are read, reductions in the order in which gradients are ready. A bucket ends where its bytes are enough, or where
the next one would leave it a window that hides too little.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from ..cost.profile import Profile
from ..cost.site_sizes import shape_of_site
from ..cost.split_time import SplitTimes, split_times
from ..graph.aten import dtype_of
from ..match.collectives import Op
from ..match.site import Split
from ..select.peak_memory import is_fused
from ..select.profitability import SiteCosts
from .split_candidates import SplitCandidate

MOST_BYTES = 4 << 20
"""Landing memory of a bucket at most."""

Bounds = Mapping[int, tuple[int, int]]
"""By number of the candidate: the positions between which it may start and finish."""
Hidden = Callable[[int, int], float]
"""(first, last) -> the microseconds of the nodes at these positions."""


def form_buckets(
    splits: Mapping[int, SplitCandidate], bounds: Bounds, hidden_us: Hidden, costs: SiteCosts
) -> dict[int, SplitCandidate]:
    """Return the candidates with small ones in buckets, each at the number of its first.

    What is in no bucket and may not be split alone is left out.
    """
    requested: dict[str, list[SplitCandidate]] = {}
    classes: dict[tuple[Any, ...], list[SplitCandidate]] = {}
    for s in splits.values():
        if s.requested_bucket:
            requested.setdefault(s.requested_bucket, []).append(s)
        if s.is_small and hidden_us(*bounds[s.number]) >= s.times.transfer_us:
            classes.setdefault(_class_of(s), []).append(s)
    groups = [members for members in requested.values() if len({_class_of(m) for m in members}) == 1]
    groups += [members for alike in classes.values() for members in _cut(alike, bounds, hidden_us)]
    result = {i: s for i, s in splits.items() if s.may_be_alone}
    for members in groups:
        if len(members) > 1:
            for m in members:
                result.pop(m.number, None)
            bucket = _join(members, costs)
            result[bucket.number] = bucket
    return dict(sorted(result.items()))


def _class_of(s: SplitCandidate) -> tuple[Any, ...]:
    c = s.window.collective
    return c.op, c.group, c.reduce_op, c.narrow_dtype, dtype_of(c.node), s.strategy


def _cut(members: Iterable[SplitCandidate], bounds: Bounds, hidden_us: Hidden) -> list[list[SplitCandidate]]:
    """Return the members of each bucket."""

    def key(s: SplitCandidate) -> tuple[int, int]:
        first, last = bounds[s.number]
        return (last if s.window.collective.op is Op.ALL_GATHER else first, s.number)

    buckets: list[list[SplitCandidate]] = []
    begin = end = size = 0
    transfer_us = 0.0
    for s in sorted(members, key=key):
        first, last = bounds[s.number]
        first_of_all, last_of_all = max(begin, first), min(end, last)
        fits = size + s.landing_bytes <= MOST_BYTES and first_of_all < last_of_all
        if buckets and fits and hidden_us(first_of_all, last_of_all) >= transfer_us + s.times.transfer_us:
            buckets[-1].append(s)
            begin, end = first_of_all, last_of_all
        else:
            buckets.append([s])
            begin, end, size, transfer_us = first, last, 0, 0.0
        size += s.landing_bytes
        transfer_us += s.times.transfer_us
    return buckets


def _join(members: list[SplitCandidate], costs: SiteCosts) -> SplitCandidate:
    """Return the candidate of a bucket."""
    members = sorted(members, key=lambda s: s.number)
    head = members[0]
    return replace(
        head,
        window=replace(head.window, bucket=tuple(s.window for s in members[1:])),
        times=_times(members, costs),
        landing_bytes=sum(s.landing_bytes for s in members),
        held_bytes=sum(s.held_bytes for s in members),
        halves=None,
        readers=(),
        zero_copy_times=None,
        bucket=tuple(members),
    )


def _times(members: list[SplitCandidate], costs: SiteCosts) -> SplitTimes:
    """Return the times of a bucket.

    One kernel copies all parameters into it, with their casts, but one kernel each gradient. The slice of a gather is copied
    for readers that are not compiled; one of a reduction is a view.
    """
    c, chunks = members[0].window.collective, members[0].strategy.chunks
    profile = costs.policy.profile(c.ranks, c.node.meta["val"].device.type)
    shapes = [shape_of_site(Split(s.window.collective), costs.hints) for s in members]
    known = [shape for shape in shapes if shape is not None]
    assert len(known) == len(members), "a member of a bucket has no size"
    joined = replace(known[0], rows=sum(shape.rows * shape.cols for shape in known), cols=1)
    times = split_times(joined, chunks, profile)
    sent = joined.whole_bytes / (c.ranks if c.op is Op.ALL_GATHER else 1)
    kernels = 0 if c.op is Op.ALL_GATHER else len(members) - 1
    pairs = zip(members, known, strict=True) if c.op is Op.ALL_GATHER else ()
    copied = [shape.whole_bytes for s, shape in pairs if not all(map(is_fused, s.window.readers))]
    return replace(
        times,
        plain_us=sum(s.times.plain_us for s in members),
        start_us=times.start_us + _copy_us(sent, profile) + kernels * profile.compute.launch_us,
        finish_us=times.finish_us + sum(_copy_us(size, profile) for size in copied),
    )


def _copy_us(size: float, profile: Profile) -> float:
    """Return the time of a compiled kernel that copies `size` bytes."""
    return profile.compute.launch_us + 2 * size / (profile.compute.memory_gbs * 1e3)

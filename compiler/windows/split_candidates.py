"""The collectives of a graph that may be split, with their windows, times and memory.

A user may request it for any collective. With split="auto" these are weighed, above the threshold of the options:

    gathers of parameters, and reductions for the graph's output    as data parallelism has them
    collectives of activations that no matmul takes as shards       unless other ranks may read another part of the result
    all_to_alls                                                     unless other ranks may trace other sizes

Of the first kind, some are weighed together (buckets.py), those below the threshold only so. With overlap="force" nothing is
weighed: what has no other form is split, exchanges in places that follow from their order alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch.fx import Graph, Node

from ..cost.all_to_all_time import area_bytes
from ..cost.fused_time import fused_us
from ..cost.profile import Profile
from ..cost.site_shape import SiteShape
from ..cost.site_sizes import shape_of_site, sizes_of_site
from ..cost.split_time import SplitTimes, split_times
from ..graph.aten import PADS, alias_base, shape_of
from ..graph.sizes import evaluate_size, numel
from ..match import Candidate, Fused, Miss, Split
from ..match.all_to_all import is_permute, split_args, split_sizes, why_not_split
from ..match.bucket_parts import is_copied
from ..match.collectives import Collective, Op
from ..match.window import Window, WindowFinder
from ..overrides.requested_strategy import Override
from ..plan.reasons import Reason
from ..plan.strategy import NONE, Mode, Strategy
from ..select.alternatives import Alternatives
from ..select.profitability import SiteCosts, too_small
from .hierarchy import HalfCandidate, find_halves
from .landing_result import find_readers
from .ring_slots import is_in_ring

_BUCKETED = (Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.ALL_REDUCE)
ASSUMED_ROWS = 4096
"""The value of a size of a requested collective that nothing is known of."""


@dataclass(frozen=True, slots=True)
class SplitCandidate:
    """A collective that may be split. `number`: of its candidate."""

    number: int
    window: Window
    times: SplitTimes
    strategy: Strategy
    landing_bytes: int
    held_bytes: int
    is_required: bool
    is_inner: bool = False
    """Whether it is in the middle of the graph, where independent nodes have moved into its window."""
    by_order: bool = field(default=False, kw_only=True)
    """Placed by the order of communication alone, since graphs differ between ranks (ring_slots.py)."""
    readers: tuple[Node, ...] = ()
    """What reads the result of a gather that may stay in landing memory; none where it is copied."""
    zero_copy_times: SplitTimes | None = None
    """The times of that gather without the copy."""
    halves: tuple[HalfCandidate, HalfCandidate] | None = None
    """The hierarchical form, where it may have one."""
    is_small: bool = field(default=False, kw_only=True)
    """Below the threshold of the options: it is sent in a bucket, or left alone."""
    may_share: bool = field(default=False, kw_only=True)
    """It may be sent in a bucket."""
    requested_bucket: str = field(default="", kw_only=True)
    """The bucket that a saved plan has it in."""
    bucket: tuple[SplitCandidate, ...] = ()
    """Of a bucket: all collectives in it, of which this stands for the first."""

    @property
    def members(self) -> tuple[SplitCandidate, ...]:
        """All that it stands for: those in its bucket, or itself."""
        return self.bucket or (self,)

    @property
    def numbers(self) -> tuple[int, ...]:
        """The candidates that it stands for."""
        return tuple(m.number for m in self.members)

    @property
    def may_be_alone(self) -> bool:
        """Whether it may be split without a bucket. Across hosts the latency of a small collective is worth hiding too."""
        return not self.is_small or self.window.collective.hosts > 1

    @property
    def best_times(self) -> SplitTimes:
        return self.zero_copy_times or self.times


def find_splits(
    graph: Graph,
    candidates: Sequence[Candidate],
    found: Sequence[Alternatives],
    overrides: Mapping[int, Override],
    costs: SiteCosts,
    parameters: Collection[Node] | None,
    forced: Collection[int] = (),
) -> dict[int, SplitCandidate]:
    """Return the collectives that may be split, by number of the candidate. `overrides` and `parameters`: as in choose.py.

    `forced`: candidates that are to be split, where that is legal, as they have no other form (overlap="force").
    An all_to_all that is left alone has the reason in its alternatives, since it has no other form.
    """
    finder: WindowFinder | None = None
    splits: dict[int, SplitCandidate] = {}
    widening = {n for candidate in candidates if (w := candidate.collective.widening) for n in w.nodes}
    for i, (candidate, alternatives) in enumerate(zip(candidates, found, strict=True)):
        c, override = candidate.collective, overrides.get(i)
        strategy = override.strategy if override else None
        requested = strategy if isinstance(strategy, Strategy) and strategy.mode is Mode.SPLIT else None
        if alternatives.is_refused or c.wait is None or (strategy is not None and not requested):
            continue
        device = c.node.meta["val"].device.type
        if not requested and not (costs.policy.may_split and (i in forced or costs.policy.is_weighed(device))):
            continue
        wanted = requested or (Strategy(Mode.SPLIT) if i in forced else None)
        small = too_small(Split(c), costs.policy, wanted, costs.hints)
        may_share = _fits_bucket(c) and not (small and any(not isinstance(a.site, Fused) for a in alternatives.ranked))
        # Across hosts the latency of a small collective is worth hiding too.
        priced = _price(c, costs, requested, wanted, small if c.hosts == 1 and not may_share else None)
        if isinstance(priced, Miss):
            if c.op is Op.ALL_TO_ALL:
                alternatives.miss = priced
            continue
        finder = finder or WindowFinder(graph)
        window = finder.find(c)
        is_inner = not window.is_at_the_edge(parameters)
        if is_inner and small and c.hosts == 1:
            continue
        if wanted or not is_inner or candidate.match is None:
            # Ranks may exchange other numbers of rows, with which times differ, and places by them.
            by_order = is_in_ring(window, parameters) or (i in forced and c.op is Op.ALL_TO_ALL)
            split = _split_candidate(i, window, priced, wanted, costs, widening, by_order)
            is_small, bucket = bool(small) and may_share and not is_inner, override.bucket if override and may_share else ""
            times = split.times
            if (is_small or (bucket and is_copied(c))) and c.hosts == 1:
                times = _with_measured_plain(times, priced, costs.policy.profile(c.ranks, device))
            splits[i] = replace(
                split, times=times, is_inner=is_inner, is_small=is_small, requested_bucket=bucket,
                may_share=may_share and not is_inner,
            )  # fmt: skip
    return splits


def _fits_bucket(c: Collective) -> bool:
    """Return whether a collective may be sent together with others: its sizes are known. Bytes are not copied into a bucket."""
    if c.op not in _BUCKETED or c.reduce_op not in ("", "sum", "avg") or (c.narrow_dtype.itemsize == 1 and is_copied(c)):
        return False
    return all(isinstance(size, int) and size > 0 for size in (*shape_of(c.input), *shape_of(c.node)))


def _with_measured_plain(times: SplitTimes, shape: SiteShape, profile: Profile) -> SplitTimes:
    """Return the times with the plain time of a small collective as measured for few tokens: its kernel counts from it too."""
    measured = fused_us(profile, shape, NONE)
    return times if measured is None else replace(times, plain_us=measured)


def _price(
    c: Collective, costs: SiteCosts, requested: Strategy | None, wanted: Strategy | None, small: Miss | None
) -> SiteShape | Miss:
    """Return the sizes of a collective for the cost model, or why it is not split.

    `wanted`: that it is split whatever it costs, `requested`: by an override. `small`: that it is below the threshold.
    """
    if c.op is Op.ALL_TO_ALL and not requested and (miss := why_not_split(c)):
        return miss
    if small is not None:
        return small
    shape = shape_of_site(Split(c), costs.hints)
    if shape is None and wanted:
        unknown = {s for size in shape_of(c.input) if not isinstance(size, int) for s in size.free_symbols}
        shape = shape_of_site(Split(c), dict.fromkeys(unknown, ASSUMED_ROWS) | dict(costs.hints))
    if shape is None and sizes_of_site(Split(c)) is None:
        return Miss(Reason.DTYPE_UNSUPPORTED, f"no cost is known of the type of {c.input.name}")
    return shape or Miss(Reason.DYNAMIC_SHAPE, f"the size of {c.input.name} is known at run time only")


def _split_candidate(
    number: int,
    window: Window,
    shape: SiteShape,
    requested: Strategy | None,
    costs: SiteCosts,
    widening: Collection[Node],
    by_order: bool,
) -> SplitCandidate:
    c, strategy = window.collective, requested or Strategy(Mode.SPLIT)
    profile = costs.policy.profile(c.ranks, c.node.meta["val"].device.type)
    costs.profiles[profile.digest] = profile
    times = split_times(shape, strategy.chunks, profile)
    split = SplitCandidate(number, window, times, strategy, *_memory(window, costs), requested is not None or by_order)
    if by_order:
        return replace(split, by_order=True)
    if c.hosts > 1:
        return replace(split, halves=find_halves(c, shape, strategy.chunks, costs, split.held_bytes))
    if costs.policy.may_zero_copy and c.hosts == 1 and (readers := find_readers(window, widening)) is not None:
        in_place = split_times(shape, strategy.chunks, profile, zero_copy=True)
        if in_place.shortest_us < times.shortest_us or requested:
            return replace(split, readers=tuple(readers), zero_copy_times=in_place)
    return split


def _memory(window: Window, costs: SiteCosts) -> tuple[int, int]:
    """Return the bytes of landing memory and of the input that lives until the finish.

    Our transport lands what is sent, c10d the result. An all_to_all of ours has an area for each rank, as large as the largest
    piece, and a step of a ring one area.
    """
    c = window.collective
    elements = evaluate_size(numel(shape_of(c.input)), costs.hints) or 0
    copies = [n for n in window.lead if alias_base(n) is None and n.target not in PADS]  # ranks with a full shard do not pad
    is_parameter = all(n.op == "placeholder" for n in window.sources) and not copies
    sent = elements * c.narrow_dtype.itemsize
    landing = sent * c.ranks if c.op is Op.ALL_GATHER else sent
    if c.op is Op.ALL_TO_ALL:
        landing = _areas_bytes(c, costs) if c.hosts == 1 else _received_bytes(c, costs)
    if c.op is Op.REDUCE_SCATTER and c.hosts > 1:
        landing //= c.ranks
    return landing, 0 if is_parameter else sent


def _received_bytes(c: Collective, costs: SiteCosts) -> int:
    return (evaluate_size(numel(shape_of(c.node)), costs.hints) or 0) * c.narrow_dtype.itemsize


def _areas_bytes(c: Collective, costs: SiteCosts) -> int:
    """Return the bytes of the areas of an all_to_all, each of its largest piece."""
    pieces = [evaluate_size(s, costs.hints) or 0 for splits in split_args(c) for s in split_sizes(splits)]
    row = evaluate_size(numel(shape_of(c.input)[1:]), costs.hints) or 0
    areas = 1 if is_permute(c) else c.ranks
    return areas * int(area_bytes(areas, max(pieces) * row * c.narrow_dtype.itemsize))

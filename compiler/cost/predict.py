"""(shape, strategy, profile) -> the time of the site, and when each of its steps runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from ..plan.strategy import MAX_CHUNKS, NONE, Mode, Strategy
from .curve import Curve, at, between
from .direct_time import direct_us, has_direct_times, link_us
from .fused_time import fused_us
from .matmul_time import matmul_us
from .network import network_us
from .profile import Profile
from .program import CostItem, programs
from .simulate import Contention, busy_us, play
from .site_shape import SIZES, SiteShape

STRIPES = (2, 4)
LEAST_BLOCK = 128
"""Least rows of a shard's share of a stripe: libraries are slow with batches of smaller blocks."""
LEAST_ROWS = 8
"""Least rows of a piece."""

_SIMILAR = {"all_to_all": "all_gather"}
"""Whose times stand for those of a collective that a profile has none of. On H100s an all_to_all takes 0.87 to 0.99 of the time
of a gather that sends as much from 16 MiB on, and 0.70 to 1.13 below."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Microseconds of one site by one strategy.

    `matmul_us`: its whole matmuls alone; without overlap, their sums too. `communication_us`: its transfers alone.
    `timeline`: (queue, step, begin, end), of rank 0. `idle_us`: the time in which the compute queue waits.
    """

    us: float
    matmul_us: float
    communication_us: float
    timeline: tuple[tuple[str, str, float, float], ...] = ()
    idle_us: float = 0.0


def candidates(shape: SiteShape, profile: Profile) -> list[Strategy]:
    """Return the strategies that can run the site and have times in `profile`, none first."""
    if shape.ranks == 1 or shape.hosts > 1 or shape.collective == "all_to_all":
        return [NONE]
    if shape.bulk:
        return [NONE, Strategy(Mode.BULK)]
    ranks = shape.ranks
    counts = {c for c in (1, 2, ranks // 2, ranks, 2 * ranks) if 0 < c <= MAX_CHUNKS or c == ranks}
    rows = max((m[2] if m[3] else m[0] for m in shape.own_matmuls), default=shape.rows)
    limit = ranks if shape.shard_dim_is_last else max(1, rows // LEAST_ROWS)
    found = [Strategy(Mode.PIPELINED, 0 if c == ranks else c) for c in sorted(counts) if c <= limit or c == 1]
    if not shape.gathers and not shape.shard_dim_is_last:
        found += [Strategy(Mode.PIPELINED, c, striped=True) for c in STRIPES if c * ranks * LEAST_BLOCK <= rows]
    if not shape.why_not_direct and has_direct_times(profile, shape):
        found.append(Strategy(Mode.DIRECT))
    return [NONE, *found]


def predict(shape: SiteShape, strategy: Strategy, profile: Profile) -> Prediction:
    """Predict a site. ValueError where the strategy cannot run it."""
    return _predict(shape, strategy, profile)


@lru_cache(maxsize=4096)
def _predict(shape: SiteShape, strategy: Strategy, profile: Profile) -> Prediction:
    if shape.is_fused:
        return _fused(shape, strategy, profile)
    if strategy == NONE:
        return _plain(shape, profile, _whole_matmuls(shape, profile))
    copy_us, shape = sum(at(profile.copy, size) for size in shape.copied_bytes), shape.computed
    matmuls = _whole_matmuls(shape, profile)
    steps = profile.steps
    made = programs(shape.key(strategy))
    cost = item_costs(shape, profile)
    contention = Contention(
        1 + profile.matmul_slowdown, 1 + profile.push_slowdown, steps.event_us, steps.wait_us, steps.arrive_us
    )
    times = play(made, cost, contention)
    pushes = sum(cost(item.work) for item in made[0] if item.work.what == "push")
    if strategy.direct:
        pushes += link_us(profile, shape.ranks, shape.dtype, shape.rows, shape.cols)
    flags = sum(cost(item.work) for item in made[0] if item.work.what == "flag")
    us = max(end for rank in times for _, end in rank)
    busy = max(busy_us(program, rank, contention) for program, rank in zip(made, times, strict=True))
    # Pieces and the whole are measured separately. The floor ensures that cutting never makes a matmul faster than the whole.
    floor = max(sum(matmuls), pushes)
    packing = (("COMPUTE", "pack operands", 0.0, copy_us),) if copy_us else ()
    timeline = tuple(
        ("COPY" if item.copies else "COMPUTE", item.text, copy_us + begin, copy_us + end)
        for item, (begin, end) in zip(made[0], times[0], strict=True)
    )
    us = max(us, floor)
    return Prediction(copy_us + us, sum(matmuls), pushes + flags, (*packing, *timeline), us - busy)


def collective_us(shape: SiteShape, profile: Profile) -> float:
    """Return the microseconds of the plain collective."""
    if shape.ranks == 1:
        return 0.0
    if shape.hosts > 1 and profile.network is not None:
        kind, sent = shape.collective, shape.bytes_sent
        return network_us(profile.network, profile.push, kind, shape.ranks, shape.hosts, sent, shape.to_one_rank)
    curves = profile.collectives.get(shape.collective) or _similar_curves(shape, profile)
    found = between(curves, shape.ranks, shape.bytes_sent)
    # Not measured: a ring at the bandwidth of the port.
    return 15.0 + at(profile.push, shape.bytes_sent) if found is None else found


def _similar_curves(shape: SiteShape, profile: Profile) -> Mapping[int, Curve]:
    return profile.collectives.get(_SIMILAR.get(shape.collective, ""), {})


def why_assumed(shape: SiteShape, profile: Profile) -> str:
    """Return why the time of the plain collective is no measured one; "" where it is, or is interpolated between such."""
    if shape.hosts > 1 and profile.network is not None:
        return "" if profile.network.source.startswith("measured") else f"the network of profile {profile} is assumed"
    if profile.collectives.get(shape.collective):
        return ""
    assumed = "run as pushes do"
    if _similar_curves(shape, profile):
        assumed = f"take as long as an {_SIMILAR[shape.collective]} that sends as much"
    return f"profile {profile} has no times of {shape.collective}, which is assumed to {assumed}"


def _plain(shape: SiteShape, profile: Profile, matmuls: list[float]) -> Prediction:
    """Predict the collective and the matmuls one after the other."""
    collective, at_us = collective_us(shape, profile), 0.0
    work = [(f"matmul {i}", us) for i, us in enumerate(matmuls)]
    terms = len(shape.own_matmuls)
    if terms > 1 and not shape.gathers:
        # Summed products: a plain matmul that adds to a sum copies it first; a schedule's adds in place.
        m, n, _, _ = shape.matmuls[0]
        work += [(f"sum {i}", at(profile.copy, m * n * SIZES[shape.dtype])) for i in range(1, terms)]
    steps = (
        [(shape.collective, collective), *work]
        if "gather" in shape.kind or shape.bulk
        else [*work, (shape.collective, collective)]
    )
    timeline = []
    for text, us in steps:
        timeline.append(("COMPUTE", text, at_us, at_us + us))
        at_us += us + profile.steps.gap_us
    computed = sum(us for _, us in work)
    return Prediction(max(0.0, at_us - profile.steps.gap_us), computed, collective, tuple(timeline))


def _fused(shape: SiteShape, strategy: Strategy, profile: Profile) -> Prediction:
    """Predict a collective of few tokens with what follows it."""
    us = fused_us(profile, shape, strategy)
    if us is None and strategy != NONE:
        raise ValueError(f"{strategy} of {shape} was not measured for profile {profile}")
    us = collective_us(shape, profile) if us is None else us
    text = shape.collective if strategy == NONE else f"{shape.collective} {strategy}"
    return Prediction(us, 0.0, us, (("COMPUTE", text, 0.0, us),))


def _layout(shape: SiteShape, contracts: bool) -> str:
    return "tn" if contracts else "nt"


def _whole_matmuls(shape: SiteShape, profile: Profile) -> list[float]:
    return [_whole_us(shape, profile, index) for index in range(len(shape.matmuls))]


def _whole_us(shape: SiteShape, profile: Profile, index: int) -> float:
    m, n, k, contracts = shape.matmuls[index]
    return matmul_us(profile, shape.multiplied, _layout(shape, contracts), m, n, k)


def item_costs(shape: SiteShape, profile: Profile) -> Callable[[CostItem], float]:
    """Return the function that gives the time of each item at this shape."""
    steps = profile.steps
    fixed = {
        "begin": steps.begin_us, "end": steps.end_us, "flag": steps.flag_us, "signal": steps.signal_us, "wait": steps.wait_us,
    }  # fmt: skip
    known: dict[int, float] = {}  # by identity: the cached programs keep the items alive

    def cost(work: CostItem) -> float:
        us = known.get(id(work))
        if us is None:
            us = fixed.get(work.what)
            us = known[id(work)] = _cost(shape, profile, work) if us is None else us
        return us

    return cost


def _cost(shape: SiteShape, profile: Profile, work: CostItem) -> float:
    size = work.share * shape.shard_bytes
    on_wire = work.share * shape.shard_bytes_on_wire
    reduced = work.share * shape.reduced_shard_bytes
    match work.what:
        case "push":
            return at(profile.push, reduced if work.of_sum else on_wire)
        case "copy":
            return at(profile.copy, reduced if work.of_sum else size)
        case "reduce":
            # It reads this rank's own piece and the received ones, and writes one.
            return at(profile.reduce, size + on_wire * (work.pieces - 1) + reduced)
        case "matmul":
            return _piece_us(shape, profile, work)
        case "direct":
            m, n, k, _ = shape.matmuls[work.index]
            return direct_us(profile, shape.ranks, shape.dtype, m, n, k, shape.outer)
        case "finish":
            m, n, _, _ = shape.matmuls[work.index]
            return at(profile.reduce, m * n * (4 + SIZES[shape.dtype]))
        case "opaque":
            return work.us
    raise AssertionError(work)


def _piece_us(shape: SiteShape, profile: Profile, work: CostItem) -> float:
    """Return the time of a matmul of some shards: fewer rows, a shorter inner dim (contractions), or fewer columns
    (shard_dim_is_last)."""
    m, n, k, contracts = shape.matmuls[work.index]
    part = work.share / shape.ranks
    layout, pieces = _layout(shape, contracts), work.pieces
    if shape.outer > 1 and part < 1:
        pieces *= shape.outer
    if contracts and part < 1:
        us = matmul_us(profile, shape.multiplied, layout, m, n, round(k * part))
        # Accumulated in fp32: the sum is written in fp32, and read again by every further piece.
        more = m * n * (4 - SIZES[shape.dtype] + (4 if work.adds else 0))
        return us + max(0.0, more / (profile.compute.memory_gbs * 1e3))
    # A further term of a sum reads the piece that it adds to.
    more_us = m * n * part * SIZES[shape.dtype] / (profile.compute.memory_gbs * 1e3) if work.adds else 0.0
    if shape.shard_dim_is_last and not shape.gathers and not shape.bulk:
        return matmul_us(profile, shape.multiplied, layout, m, round(n * part), k) + more_us
    rows, count = round(m * part / pieces), max(1, round(1 / part)) if part else 1
    first = matmul_us(profile, shape.multiplied, layout, rows, n, k, pieces)
    # All pieces but one find the right operand in the cache; which one is the first makes no difference here.
    return (first + (count - 1) * matmul_us(profile, shape.multiplied, layout, rows, n, k, pieces, True)) / count + more_us

"""The strategy of an op: a single one, a table for dynamic sizes, or alternatives to time (forms: plan/strategy.py).

A site with dynamic rows is predicted at powers of two of the symbol that its rows depend on, within the symbol's range; other
symbols keep their traced values. A call uses the choice of the nearest of these sizes. Sites with static rows are predicted
once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

from ..cost.choice import StrategyChoice
from ..cost.site_shape import SiteShape
from ..cost.site_sizes import Hints, Ranges, shape_at
from ..graph.aten import shape_of
from ..graph.sizes import Size, evaluate_size, numel
from ..match import Gather, Reduction, Site
from ..match.collectives import Op
from ..plan.decision import SiteSizes
from ..plan.strategy import NONE, Bucket, DispatchTable, Strategy, table

LEAST_ROWS, MOST_ROWS = 128, 131072
"""Sizes that are predicted by default. Smaller ones use the choice of the smallest, larger ones that of the largest."""
ALTERNATIVES = 3
WITHIN = 0.25
"""autotune=True times at most this many strategies, predicted to take at most this share more than the chosen one."""


@dataclass(frozen=True, slots=True)
class DispatchSettings:
    """The options of predicted sites.

    `min_bytes`: calls in which a rank sends less are left alone. `least_rows`: the smallest size that is predicted.
    """

    min_bytes: int
    is_autotuned: bool
    least_rows: int = LEAST_ROWS


def rows_of(site: Site) -> Size:
    """Return the rows of the whole matrix, as csrc/bindings/ops/dispatch.h counts them."""
    if isinstance(site, Gather | Reduction):
        return site.rows
    c = site.collective
    return numel(shape_of(c.input)[:-1]) * (c.ranks if c.op is Op.ALL_GATHER else 1)


def rows_at(site: Site, hints: Hints) -> int | None:
    """Return the same as traced; None without a value."""
    return evaluate_size(rows_of(site), hints)


def choose_for_all_sizes(
    traced: StrategyChoice,
    choose_at: Callable[[SiteShape], StrategyChoice],
    sizes: SiteSizes,
    rows: Size,
    hints: Hints,
    ranges: Ranges,
    settings: DispatchSettings,
) -> StrategyChoice:
    """Return the choice for all `sizes` that the site may have. `traced`: the choice for the traced sizes; `choose_at`: the one
    for others; `rows`: those of a call."""
    buckets = _buckets(choose_at, sizes, rows, hints, ranges, settings)
    if buckets is None:
        strategies = _alternatives(traced, settings)
        return replace(traced, strategy=table([Bucket(None, strategies)])) if len(strategies) > 1 else traced
    strategy = table(buckets)
    text = f"by rows {strategy}" if isinstance(strategy, DispatchTable) else f"{strategy} for all sizes"
    return replace(traced, strategy=strategy, reason=f"{text}; as traced: {traced.reason}")


def _alternatives(choice: StrategyChoice, settings: DispatchSettings) -> tuple[Strategy, ...]:
    """Return the chosen strategy, and those to time with it."""
    chosen = choice.strategy
    assert isinstance(chosen, Strategy)
    if not settings.is_autotuned:
        return (chosen,)
    limit = choice.predictions[str(chosen)].us * (1 + WITHIN)
    others = sorted((s for s in choice.open if s != chosen), key=lambda s: choice.predictions[str(s)].us)
    return (chosen, *(s for s in others[: ALTERNATIVES - 1] if choice.predictions[str(s)].us <= limit))


def _buckets(
    choose_at: Callable[[SiteShape], StrategyChoice],
    sizes: SiteSizes,
    rows: Size,
    hints: Hints,
    ranges: Ranges,
    settings: DispatchSettings,
) -> list[Bucket] | None:
    """Return the buckets of a table; None for static rows, or sizes without values."""
    symbols = [] if isinstance(rows, int) else [s for s in rows.free_symbols if s in ranges]
    if not symbols:
        return None
    # The symbol with the widest range. All ranks trace the same names.
    main = min(symbols, key=lambda s: (-(ranges[s][1] or MOST_ROWS * 2) / max(1, ranges[s][0]), str(s)))
    sizes_at: list[tuple[int, Hints]] = []
    for value in _values(*ranges[main]):
        known = {**hints, main: value}
        at = evaluate_size(rows, known)
        if at is None or (sizes_at and at < sizes_at[-1][0]):
            return None  # rows that do not grow with the symbol
        if not sizes_at or at > sizes_at[-1][0]:  # s // 8 stays at 0 for a while
            sizes_at.append((at, known))
    inside = [at for at in sizes_at if settings.least_rows <= at[0] <= MOST_ROWS] or sizes_at[-1:]
    shapes = [shape for _, known in inside if (shape := shape_at(sizes, known)) is not None]
    if len(shapes) < len(inside):
        return None
    limits = [(low[0] + high[0]) // 2 for low, high in pairwise(inside)]
    few = _rows_below_threshold(inside[0][0], shapes[0], settings.min_bytes)
    buckets = [Bucket(few, (NONE,))] if few > 0 else []
    for limit, shape in zip([*limits, None], shapes, strict=True):
        if limit is None or limit > few:
            buckets.append(Bucket(limit, _alternatives(choose_at(shape), settings)))
    return buckets


def _values(least: int, most: int | None) -> list[int]:
    """Return the powers of two from `least` to `most`, at least one value."""
    most = min(most or MOST_ROWS, MOST_ROWS)
    least = max(1, least)
    powers = [1 << n for n in range(MOST_ROWS.bit_length()) if least <= 1 << n <= most]
    return powers or [max(least, most)]


def _rows_below_threshold(rows: int, shape: SiteShape, min_bytes: int) -> int:
    """Return the largest number of rows for which a rank sends less than `min_bytes`; `shape` has `rows`."""
    sent = round(shape.bytes_sent)
    return (min_bytes * rows - 1) // sent if sent and rows and min_bytes else 0

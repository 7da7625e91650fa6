"""What an op carries: one strategy, a table for sizes that change, alternatives to be timed (strategy.py has the forms).

Dynamic sizes: the site is weighed at powers of two of the symbol that its rows depend on, within the symbol's range, the other
symbols as they were traced; a call takes the choice of the nearest of these sizes. Sites with static rows are weighed once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

from ..cost.choice import StrategyChoice
from ..cost.site_shape import SiteShape
from ..cost.site_sizes import Hints, Ranges, shape_at
from ..graph.aten import shape_of
from ..graph.sizes import Size, numel
from ..match import Bulk, Site
from ..match.collectives import Op
from ..plan.decision import SiteSizes
from ..plan.strategy import NONE, Bucket, DispatchTable, Strategy, table

LEAST_ROWS, MOST_ROWS = 128, 131072
"""Sizes that are weighed: smaller ones take the choice of the smallest, larger ones that of the largest."""
ALTERNATIVES = 3
WITHIN = 0.25
"""autotune=True times at most so many strategies, predicted to take at most this share more than the chosen one."""


@dataclass(frozen=True, slots=True)
class DispatchSettings:
    """What the options say of sites that are weighed. `min_bytes`: calls of which a rank sends less are left alone."""

    min_bytes: int
    tune: bool


def rows_of(site: Site) -> Size:
    """Rows of the whole matrix, as csrc/bindings/ops/dispatch.h counts them."""
    if not isinstance(site, Bulk):
        return site.rows
    c = site.collective
    return numel(shape_of(c.input)[:-1]) * (c.ranks if c.op is Op.ALL_GATHER else 1)


def rows_at(site: Site, hints: Hints) -> int | None:
    """The same as traced; None without a value."""
    rows = rows_of(site)
    if isinstance(rows, int):
        return rows
    value = rows.subs(hints)
    return int(value) if value.is_Integer else None


def carried(
    traced: StrategyChoice,
    weigh: Callable[[SiteShape], StrategyChoice],
    sizes: SiteSizes,
    rows: Size,
    hints: Hints,
    ranges: Ranges,
    asked: DispatchSettings,
) -> StrategyChoice:
    """`traced` is the choice for the sizes as traced; `weigh` makes one for others. Returns what holds for all `sizes` that the
    site may have, `rows` being those of a call."""
    buckets = _buckets(weigh, sizes, rows, hints, ranges, asked)
    if buckets is None:
        strategies = _alternatives(traced, asked)
        return replace(traced, strategy=table([Bucket(None, strategies)])) if len(strategies) > 1 else traced
    found = table(buckets)
    says = f"by rows {found}" if isinstance(found, DispatchTable) else f"{found} for all sizes"
    return replace(traced, strategy=found, reason=f"{says}; as traced: {traced.reason}")


def _alternatives(choice: StrategyChoice, asked: DispatchSettings) -> tuple[Strategy, ...]:
    """The choice, and what to time beside it."""
    chosen = choice.strategy
    assert isinstance(chosen, Strategy)
    if not asked.tune:
        return (chosen,)
    limit = choice.predictions[str(chosen)].us * (1 + WITHIN)
    others = sorted((s for s in choice.open if s != chosen), key=lambda s: choice.predictions[str(s)].us)
    return (chosen, *(s for s in others[: ALTERNATIVES - 1] if choice.predictions[str(s)].us <= limit))


def _buckets(
    weigh: Callable[[SiteShape], StrategyChoice],
    sizes: SiteSizes,
    rows: Size,
    hints: Hints,
    ranges: Ranges,
    asked: DispatchSettings,
) -> list[Bucket] | None:
    """None where there is nothing to tell apart: static rows, or sizes without values."""
    symbols = [] if isinstance(rows, int) else [s for s in rows.free_symbols if s in ranges]
    if not symbols:
        return None
    # The one that may change most; all ranks trace the same names.
    main = min(symbols, key=lambda s: (-(ranges[s][1] or MOST_ROWS * 2) / max(1, ranges[s][0]), str(s)))
    values = _values(*ranges[main])
    found = [rows.subs({**hints, main: value}) for value in values]
    if not all(at.is_Integer for at in found) or any(low >= high for low, high in pairwise(found)):
        return None  # rows that do not grow with the symbol
    sizes_at = [(int(at), {**hints, main: value}) for at, value in zip(found, values, strict=True)]
    inside = [at for at in sizes_at if LEAST_ROWS <= at[0] <= MOST_ROWS] or sizes_at[-1:]
    shapes = [shape for _, known in inside if (shape := shape_at(sizes, known)) is not None]
    if len(shapes) < len(inside):
        return None
    limits = [(low[0] + high[0]) // 2 for low, high in pairwise(inside)]
    few = _too_few(inside[0][0], shapes[0], asked.min_bytes)
    buckets = [Bucket(few, (NONE,))] if few > 0 else []
    for limit, shape in zip([*limits, None], shapes, strict=True):
        if limit is None or limit > few:
            buckets.append(Bucket(limit, _alternatives(weigh(shape), asked)))
    return buckets


def _values(least: int, most: int | None) -> list[int]:
    """Powers of two from `least` to `most`, and at least one value."""
    most = min(most or MOST_ROWS, MOST_ROWS)
    least = max(1, least)
    found = [1 << n for n in range(MOST_ROWS.bit_length()) if least <= 1 << n <= most]
    return found or [max(least, most)]


def _too_few(rows: int, shape: SiteShape, min_bytes: int) -> int:
    """The largest number of rows of which a rank sends less than `min_bytes`; `rows` make `shape`."""
    sent = round(shape.bytes_sent)
    return (min_bytes * rows - 1) // sent if sent and rows and min_bytes else 0

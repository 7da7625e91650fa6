"""What an op carries: one strategy, a table for sizes that change, alternatives to be timed (strategy.py has the forms).

Dynamic sizes: the site is weighed at powers of two of the symbol that its rows depend on, within the symbol's range, the other
symbols as they were traced; a call takes the choice of the nearest of these sizes. Sites with static rows are weighed once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import sympy

from ..cost.choose import Choice
from ..cost.of_site import Hints, Ranges, shape_of_site
from ..cost.shape import SiteShape
from ..sites import Bulk, Site
from ..sites.collectives import Op
from ..sites.sizes import Size, product
from ..sites.values import shape_of
from ..strategy import NONE, Bucket, Strategy, Table, table

LEAST_ROWS, MOST_ROWS = 128, 131072
"""Sizes that are weighed: smaller ones take the choice of the smallest, larger ones that of the largest."""
ALTERNATIVES = 3
WITHIN = 0.25
"""What is timed by tune=True: so many strategies, those that are predicted to take so much more than the chosen one at most."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What the options say of sites that are weighed. `min_bytes`: calls of which a rank sends less are left alone."""

    min_bytes: int
    tune: bool


def rows_of(site: Site) -> Size:
    """Rows of the whole matrix, as csrc/bindings/ops/picked.h counts them."""
    if not isinstance(site, Bulk):
        return site.rows
    c = site.collective
    return product(shape_of(c.input)[:-1]) * (c.ranks if c.op is Op.ALL_GATHER else 1)


def rows_at(site: Site, hints: Hints) -> int | None:
    """The same as traced; None without a value."""
    value = sympy.sympify(rows_of(site)).subs(hints)
    return int(value) if value.is_Integer else None


def carried(
    traced: Choice, weigh: Callable[[SiteShape], Choice], site: Site, hints: Hints, ranges: Ranges, asked: Asked
) -> Choice:
    """`traced` is the choice for the sizes as traced; `weigh` makes one for others. Returns what holds for all sizes."""
    buckets = _buckets(weigh, site, hints, ranges, asked)
    if buckets is None:
        strategies = _alternatives(traced, asked)
        return replace(traced, strategy=table([Bucket(None, strategies)])) if len(strategies) > 1 else traced
    found = table(buckets)
    says = f"by rows {found}" if isinstance(found, Table) else f"{found} for all sizes"
    return replace(traced, strategy=found, reason=f"{says}; at the traced {rows_at(site, hints)} rows {traced.reason}")


def _alternatives(choice: Choice, asked: Asked) -> tuple[Strategy, ...]:
    """The choice, and what to time beside it."""
    chosen = choice.strategy
    assert isinstance(chosen, Strategy)
    if not asked.tune:
        return (chosen,)
    limit = choice.predictions[str(chosen)].us * (1 + WITHIN)
    others = sorted((s for s in choice.open if s != chosen), key=lambda s: choice.predictions[str(s)].us)
    return (chosen, *(s for s in others[: ALTERNATIVES - 1] if choice.predictions[str(s)].us <= limit))


def _buckets(
    weigh: Callable[[SiteShape], Choice], site: Site, hints: Hints, ranges: Ranges, asked: Asked
) -> list[Bucket] | None:
    """None where there is nothing to tell apart: static rows, or sizes without values."""
    rows = rows_of(site)
    symbols = [] if isinstance(rows, int) else [s for s in rows.free_symbols if s in ranges]
    if not symbols:
        return None
    # The one that may change most; all ranks trace the same names.
    main = min(symbols, key=lambda s: (-(ranges[s][1] or MOST_ROWS * 2) / max(1, ranges[s][0]), str(s)))
    weighed: list[tuple[int, SiteShape]] = []
    for value in _values(*ranges[main]):
        at = rows.subs({**hints, main: value})
        shape = shape_of_site(site, {**hints, main: value})
        if not at.is_Integer or shape is None:
            return None
        if weighed and int(at) <= weighed[-1][0]:
            return None  # rows that do not grow with the symbol
        weighed.append((int(at), shape))
    inside = [w for w in weighed if LEAST_ROWS <= w[0] <= MOST_ROWS] or weighed[-1:]
    limits = [(low[0] + high[0]) // 2 for low, high in pairwise(inside)]
    few = _too_few(inside[0], asked.min_bytes)
    buckets = [Bucket(few, (NONE,))] if few > 0 else []
    for limit, (_, shape) in zip([*limits, None], inside, strict=True):
        if limit is None or limit > few:
            buckets.append(Bucket(limit, _alternatives(weigh(shape), asked)))
    return buckets


def _values(least: int, most: int | None) -> list[int]:
    """Powers of two from `least` to `most`, and at least one value."""
    most = min(most or MOST_ROWS, MOST_ROWS)
    least = max(1, least)
    found = [1 << n for n in range(MOST_ROWS.bit_length()) if least <= 1 << n <= most]
    return found or [max(least, most)]


def _too_few(sample: tuple[int, SiteShape], min_bytes: int) -> int:
    """The largest number of rows of which a rank sends less than `min_bytes`."""
    rows, shape = sample
    sent = round(shape.bytes_sent)
    return (min_bytes * rows - 1) // sent if sent and rows and min_bytes else 0

"""A graph's site in numbers."""

from __future__ import annotations

from collections.abc import Mapping

import sympy
import torch
from torch.fx import Graph

from ub_overlap import _torch_compat as compat

from ..sites.collectives import Op
from ..sites.match import Gather, Reduction, Site
from ..sites.sizes import Size, hint, product, symbols
from ..sites.values import dtype_of, shape_of
from .shape import SIZES, SiteShape

Ranges = Mapping[sympy.Symbol, tuple[int, int | None]]
"""Size symbols and the least and the largest value (None: any) that the graph is good for."""
Hints = Mapping[sympy.Symbol, int]
"""Size symbols and the values they had when the graph was traced."""

_BULK = {Op.ALL_GATHER: "bulk_all_gather", Op.REDUCE_SCATTER: "bulk_reduce_scatter", Op.ALL_REDUCE: "bulk_all_reduce"}


def hints_of(graph: Graph) -> dict[sympy.Symbol, int]:
    """The values behind the symbols that the graph's inputs carry plainly."""
    return {symbol: value for symbol, x in symbols(graph) if (value := hint(x)) is not None}


def ranges_of(graph: Graph) -> dict[sympy.Symbol, tuple[int, int | None]]:
    """The ranges of the same symbols."""
    return {symbol: compat.range_of(x) for symbol, x in symbols(graph)}


def shape_of_site(site: Site, hints: Hints) -> SiteShape | None:
    """None where a size has no hint, or a dtype no cost."""
    c = site.collective

    def number(x: Size) -> int:
        if isinstance(x, int):
            return x
        value = sympy.sympify(x).subs(hints)
        if not value.is_Integer:
            raise ValueError(f"no value for {x}")
        return int(value)

    try:
        if isinstance(site, Gather):
            rows, cols = number(site.rows), number(site.cols)
            matmuls = []
            for k in site.consumers:
                own = _about(number(k.operand.cols))
                m, inner = (rows, cols) if k.mode < 2 else (cols, rows)
                matmuls.append((m, own, inner, k.contracts(site.last)))
            return SiteShape(
                kind="all_gather_matmul",
                ranks=c.ranks,
                dtype=_dtype(site.dtype),
                matmuls=tuple(matmuls),
                rows=rows,
                cols=cols,
                keep=bool(site.roots),
                whole=site.last,
                outer=1 if site.last else number(site.blocks.outer),
            )
        if isinstance(site, Reduction):
            rows, cols = number(site.rows), number(site.cols)
            return SiteShape(
                kind="matmul_all_reduce" if c.op is Op.ALL_REDUCE else "matmul_reduce_scatter",
                ranks=c.ranks,
                dtype=_dtype(dtype_of(site.terms[0].node)),
                matmuls=tuple((rows, cols, _about(number(t.inner)), False) for t in site.terms),
                rows=rows,
                cols=cols,
                whole=site.last,
                outer=1 if site.last or c.op is Op.ALL_REDUCE else number(site.blocks.outer),
            )
        if c.op not in _BULK:
            return None
        elements = number(product(shape_of(c.input)))
        return SiteShape(
            kind=_BULK[c.op],
            ranks=c.ranks,
            dtype=_dtype(dtype_of(c.input)),
            matmuls=tuple((number(p.shape[0]), number(p.shape[1]), number(p.inner), False) for p in site.products),
            rows=elements * (c.ranks if c.op is Op.ALL_GATHER else 1),
            cols=1,
        )
    except ValueError:
        return None


def _about(x: int) -> int:
    """A size that may differ a little between ranks, so that they reckon alike: sizes that are no multiple of 64 are rounded up
    to an eighth of their octave (the last columns of a weight may lie on fewer ranks)."""
    if x % 64 == 0:
        return x
    step = max(1, 1 << max(0, x.bit_length() - 4))
    return -(-x // step) * step


def _dtype(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in SIZES:
        raise ValueError(f"no cost for {name}")
    return name

"""The sizes of a graph's site."""

from __future__ import annotations

from collections.abc import Mapping

import sympy
import torch
from torch.fx import Graph

from ub_overlap import _torch_compat as compat
from ub_overlap.runtime.fp8.numerics import FLOAT8

from ..graph.aten import dtype_of, shape_of
from ..graph.sizes import Size, about, evaluate_size, numel, size_symbols
from ..match.all_to_all import is_permute
from ..match.collectives import Op, byte_dtype
from ..match.site import Bulk, Fused, Gather, Reduction, Site, Split
from ..plan.decision import SiteSizes
from .site_shape import SIZES, SiteShape

Ranges = Mapping[sympy.Symbol, tuple[int, int | None]]
"""Size symbols with the least and the largest value (None: any) for which the graph is valid."""
Hints = Mapping[sympy.Symbol, int]
"""Size symbols with their values when the graph was traced."""
NO_HINTS: Hints = {}

_BULK = {Op.ALL_GATHER: "bulk_all_gather", Op.REDUCE_SCATTER: "bulk_reduce_scatter", Op.ALL_REDUCE: "bulk_all_reduce"}


def hints_of(graph: Graph) -> dict[sympy.Symbol, int]:
    """Return the values of the symbols that are sizes of the graph's inputs, as decisions take them."""
    return {symbol: value for symbol, x in size_symbols(graph) if (value := compat.hint_of(x)) is not None}


def ranges_of(graph: Graph) -> dict[sympy.Symbol, tuple[int, int | None]]:
    """Return the ranges of the same symbols."""
    return {symbol: compat.range_of(x) for symbol, x in size_symbols(graph)}


def shape_of_site(site: Site, hints: Hints, exact: bool = False, wire_dtype: str = "") -> SiteShape | None:
    """Return the shape of a site; None where a size has no hint, or a dtype no cost.

    `exact`: as on this rank, for reports. Choices use sizes that all ranks share (sizes.about).
    """
    sizes = sizes_of_site(site, wire_dtype)
    return None if sizes is None else shape_at(sizes, hints, exact)


def sizes_of_site(site: Site, wire_dtype: str = "") -> SiteSizes | None:
    """Return the sizes of a site, ints or expressions; None where the dtype has no cost. Equal sites have equal sizes,
    whatever the values of symbols."""
    c, operands = site.collective, ""
    if isinstance(site, Fused):
        return _sizes_of_fused(site)
    if isinstance(site, Gather):
        dtype, whole = _dtype(site.dtype), (site.rows, site.cols)
        turned = (site.cols, site.rows)
        products = [(k, whole if not k.transpose_gathered else turned) for k in site.consumers]
        matmuls = tuple((m, k.operand.cols, inner, k.contracts_shard_dim(site.shard_dim_is_last)) for k, (m, inner) in products)
        kind, keep, outer = "all_gather_matmul", bool(site.kept_aliases), 1 if site.shard_dim_is_last else site.blocks.outer
    elif isinstance(site, Reduction):
        dtype, whole = _dtype(dtype_of(site.terms[0].node)), (site.rows, site.cols)
        matmuls = tuple((site.rows, site.cols, t.inner, False) for t in site.terms)
        operands = "float8" if site.terms[0].scales is not None else ""
        kind = "matmul_all_reduce" if c.op is Op.ALL_REDUCE else "matmul_reduce_scatter"
        keep = bool(site.kept_nodes)
        outer = 1 if site.shard_dim_is_last or c.op is Op.ALL_REDUCE else site.blocks.outer
    elif c.op is Op.ALL_TO_ALL:
        dtype, (rows, *others) = _dtype(byte_dtype(c)), shape_of(c.input)
        whole, matmuls, kind, keep, outer = (rows, numel(others)), (), "all_to_all", False, 1
    elif c.op in _BULK:
        elements = numel(shape_of(c.input))
        sent = byte_dtype(c) if isinstance(site, Split) else c.narrow_dtype
        dtype, whole = _dtype(sent), (elements * (c.ranks if c.op is Op.ALL_GATHER else 1), 1)
        matmuls = tuple((*p.shape, p.inner, False) for p in site.matmuls)
        # An fp32 reduction of gradients runs concurrently with 16-bit matmuls. Of several types the slowest is priced.
        widest = max((dtype_of(p.node) for p in site.matmuls), key=lambda t: t.itemsize, default=c.narrow_dtype)
        operands = "" if (name := _dtype(widest)) in (None, dtype) else str(name)
        kind, keep, outer = _BULK[c.op], False, 1
    else:
        return None
    if dtype is None:
        return None
    if not isinstance(site, Bulk):
        matmuls += tuple((*p.shape, p.inner, False) for p in site.independent)
    last = site.shard_dim_is_last if isinstance(site, Gather | Reduction) else False
    packs = site.packs if isinstance(site, Gather | Reduction) else ()
    copies = site.pack_copies if isinstance(site, Gather | Reduction) else ()
    reduced = _dtype(dtype_of(c.node)) or "" if not isinstance(site, Gather) else dtype
    return SiteSizes(
        kind, c.ranks, dtype, matmuls, *whole, keep, last, outer, operands, wire_dtype, packs, copies, len(site.independent),
        "" if reduced == dtype else reduced, c.hosts, to_one_rank=c.op is Op.ALL_TO_ALL and is_permute(c),
    )  # fmt: skip


def _sizes_of_fused(site: Fused) -> SiteSizes | None:
    c, shape = site.collective, shape_of(site.collective.input)
    dtype = _dtype(dtype_of(c.input))
    if dtype is None or c.op is None or not shape:
        return None
    rows = numel(shape[:-1]) * (c.ranks if c.op is Op.ALL_GATHER else 1)
    has_norm = site.norm is not None or (site.branch is not None and site.branch.norm is not None)
    return SiteSizes(f"fused_{c.op.value}", c.ranks, dtype, (), rows, shape[-1], hosts=c.hosts, has_norm=has_norm)


def shape_at(sizes: SiteSizes, hints: Hints, exact: bool = False) -> SiteShape | None:
    """Return `sizes` with the values of `hints`; None where one is missing or below 0."""

    def number(x: Size) -> int:
        value = evaluate_size(x, hints)
        if value is None:
            raise ValueError(f"no value for {x}")
        return value

    try:
        found = [(number(m), number(n), number(k), contracts) for m, n, k, contracts in sizes.matmuls]
        if not exact:
            own = len(found) - sizes.independent
            found = [_alike(sizes.kind, m, is_independent=i >= own) for i, m in enumerate(found)]
        whole = (number(sizes.rows), number(sizes.cols))
        if sizes.kind == "all_to_all" and not exact:
            whole = (about(whole[0] * whole[1]), 1)  # few rows, one for each rank, may be long
        return SiteShape(
            sizes.kind,
            sizes.ranks,
            sizes.dtype,
            tuple(found),
            *whole,
            sizes.keep,
            sizes.shard_dim_is_last,
            number(sizes.outer),
            sizes.operands,
            sizes.wire_dtype,
            sizes.packs,
            sizes.pack_copies,
            sizes.independent,
            sizes.out_dtype,
            sizes.hosts,
            sizes.has_norm,
            sizes.to_one_rank,
        )
    except ValueError:
        return None


def _alike(kind: str, matmul: tuple[int, int, int, bool], is_independent: bool) -> tuple[int, int, int, bool]:
    """Round with `about` the sizes of a matmul that may differ between ranks: the columns of a gather's weight, the inner dim
    of a reduction, all sizes of independent matmuls."""
    m, n, k, contracts = matmul
    if is_independent:
        return about(m), about(n), about(k), contracts
    return (m, about(n), k, contracts) if kind == "all_gather_matmul" else (m, n, about(k), contracts)


def _dtype(dtype: torch.dtype) -> str | None:
    name = "float8" if dtype in FLOAT8 else str(dtype).removeprefix("torch.")
    return name if name in SIZES else None

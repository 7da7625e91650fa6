"""Bytes that a site sends and operations that it computes.

Legend: R ranks. Bytes are those that one rank sends: an all_gather or reduce_scatter sends (R - 1) shards, an all_reduce twice
that.
"""

from __future__ import annotations

from collections.abc import Mapping

import sympy
import torch

from ..graph.aten import dtype_of, shape_of
from ..graph.matmul import Matmul
from ..graph.sizes import about, evaluate_size, numel
from ..match.all_to_all import is_permute
from ..match.collectives import Collective, Op
from ..match.site import Fused, Gather, Reduction, Site
from .wire import bytes_on_wire, bytes_sent_by_rank

FLOPS_PER_BYTE = 2000
"""Arithmetic that hides one sent byte: about 770 TFLOP/s bf16 over 380 GB/s, an H200 on NVLink."""
FLOPS_PER_US = 770e6
BULK_PRODUCTS = 8
"""Matmuls of one bulk op at most, however small: all their operands live until the op."""


def bytes_sent(site: Site, wire_dtype: str = "", hints: Mapping[sympy.Symbol, int] | None = None) -> int | None:
    """Return the bytes one rank sends at this site, None where dynamic. `wire_dtype`: "" for the type of what is sent."""
    return bytes_sent_in(site.collective, sent_dtype(site).itemsize, hints or {}, wire_dtype)


def sent_dtype(site: Site) -> torch.dtype:
    """Return the type of the elements that a site sends, where they are not rounded to float8."""
    if isinstance(site, Gather):
        return site.dtype
    if isinstance(site, Fused):
        return dtype_of(site.collective.input)
    return dtype_of(site.terms[0].node) if isinstance(site, Reduction) else site.collective.narrow_dtype


def bytes_sent_in(c: Collective, itemsize: int, hints: Mapping[sympy.Symbol, int], wire_dtype: str = "") -> int | None:
    """Return the bytes one rank sends in `c` with elements of `itemsize` bytes; None for a size without a value.

    An all_reduce sends its sums in the type of its result. A step of a ring sends all rows to one rank. Other all_to_alls are
    taken as balanced: equal parts for all ranks.
    """
    elements = evaluate_size(numel(shape_of(c.input)), hints)
    if elements is None:
        return None
    if c.op is Op.ALL_TO_ALL and is_permute(c):
        return int(bytes_on_wire(elements, itemsize, wire_dtype))
    shard = elements if c.op is Op.ALL_GATHER else elements // c.ranks
    reduced = shard * dtype_of(c.node).itemsize if c.op is Op.ALL_REDUCE else 0
    return int(bytes_sent_by_rank(bytes_on_wire(shard, itemsize, wire_dtype), c.ranks, reduced))


def flops(p: Matmul) -> int | None:
    """Return the operations of one matmul, None where dynamic."""
    count = 2 * numel((*p.shape, p.inner))
    return count if isinstance(count, int) else None


def _about_flops(p: Matmul) -> int:
    sizes = (*p.shape, p.inner)
    return 2 * numel(map(about, sizes)) if all(isinstance(s, int) for s in sizes) else 0


def hidden_us(site: Site) -> float:
    """Estimate the microseconds of communication that a site's matmuls hide on an H200; 0 where a size is dynamic.

    For choices without a profile. The estimate grows with every matmul until all is hidden. Sizes are rounded by `about`.
    """
    known = sum(_about_flops(p) for p in site.matmuls)
    return min((bytes_sent(site) or 0) * FLOPS_PER_BYTE, known) / FLOPS_PER_US

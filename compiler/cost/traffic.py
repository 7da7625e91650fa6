"""What a site sends and computes.

Legend: R ranks. Bytes are what one rank sends: an all_gather or reduce_scatter sends (R - 1) shards, an all_reduce twice that.
"""

from __future__ import annotations

from ..graph.aten import dtype_of, shape_of
from ..graph.matmul import Matmul
from ..graph.sizes import Size, numel
from ..match.collectives import Op
from ..match.site import Gather, Reduction, Site

FLOPS_PER_BYTE = 2000
"""Arithmetic that hides one sent byte: about 770 TFLOP/s bf16 over 380 GB/s, an H200 on NVLink."""
FLOPS_PER_US = 770e6
BULK_PRODUCTS = 8
"""A bulk op takes no more products than this, however small: their operands all live until the op."""


def about(x: int) -> int:
    """A size that may differ a little between ranks, so that they reckon alike: rounded up to 64, then to an eighth of its
    octave. Full shares of what divides are such sizes as they are, mostly, and the smaller last one comes up to them."""
    x = -(-x // 64) * 64
    step = max(64, 1 << max(0, x.bit_length() - 4))
    return -(-x // step) * step


def bytes_sent(site: Site) -> int | None:
    """Bytes one rank sends at this site, None where dynamic."""
    c = site.collective
    dtype = site.dtype if isinstance(site, Gather) else dtype_of(site.terms[0].node if isinstance(site, Reduction) else c.input)
    elements: Size = numel(shape_of(c.input))
    if not isinstance(elements, int):
        return None
    shard = elements if c.op is Op.ALL_GATHER else elements // c.ranks
    return shard * dtype.itemsize * (c.ranks - 1) * (2 if c.op is Op.ALL_REDUCE else 1)


def flops(p: Matmul) -> int | None:
    """Operations of one product, None where dynamic."""
    count = 2 * numel((*p.shape, p.inner))
    return count if isinstance(count, int) else None


def _about_flops(p: Matmul) -> int:
    sizes = (*p.shape, p.inner)
    return 2 * numel(map(about, sizes)) if all(isinstance(s, int) for s in sizes) else 0


def hidden_us(site: Site) -> float:
    """About how long what a site sends would be hidden by its products, on an H200; 0 where a size is dynamic. For choices
    that no profile is asked for: it grows with every product until there are enough. Sizes are `about`."""
    known = sum(_about_flops(p) for p in site.matmuls)
    return min((bytes_sent(site) or 0) * FLOPS_PER_BYTE, known) / FLOPS_PER_US

"""scaled_matmul_reduce_scatter: sum float8 matmuls into a partial product and reduce-scatter it over the group.

Legend: R ranks of the group; o outer blocks; m rows of a shard in each block; P = o * R * m rows and Q columns of the
product.

As matmul_reduce_scatter with shard_dim_is_last=False; lhs and rhs are float8. Scales are float32 and multiply; the
granularity is

    scaling   lhs_scales[t]   rhs_scales[t]
    tensor    one element     one element
    row       [P, 1]          [1, Q]

Terms and addend are summed in product_dtype and rounded after each. With wire="plain", product_dtype is what travels.

With wire="float8", values sent to a peer are rounded to float8_e4m3fn, with one fp32 scale (amax / 448) per 1 x 128
segment of a row. Q must divide by 128. The owner sums in fp32, in rank order; its own part is not rounded to float8.
Numbers that are not finite arrive as NaN, because e4m3 has no infinity. The fallback always sends product_dtype.

Limits of a float8 product and `fast_accum`: as in all_gather_scaled_matmul.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ub_overlap import _torch_compat as compat

from . import c10d_fallback as c10d
from . import flop_counts
from .definition import OpDefinition

SCHEMA = (
    "scaled_matmul_reduce_scatter(Tensor[] lhs, Tensor[] rhs, Tensor[] lhs_scales, Tensor[] rhs_scales, Tensor? addend, "
    "SymInt outer, str reduce_op, ScalarType product_dtype, ScalarType out_dtype, bool fast_accum, str wire, "
    "str strategy, str group, str site) -> Tensor out"
)


class ScaledMatmulReduceScatterArgs(NamedTuple):
    lhs: Sequence[Tensor]
    rhs: Sequence[Tensor]
    lhs_scales: Sequence[Tensor]
    rhs_scales: Sequence[Tensor]
    addend: Tensor | None
    outer: int
    reduce_op: str
    product_dtype: torch.dtype
    out_dtype: torch.dtype
    fast_accum: bool
    wire: str
    strategy: str
    group: str
    site: str


def fake(a: ScaledMatmulReduceScatterArgs) -> Tensor:
    """Return an empty result of the right sizes."""
    ranks, rows = c10d.group_size(a.group), a.lhs[0].shape[0]
    compat.check(rows % ranks == 0, lambda: "the product cannot be scattered evenly")
    return a.lhs[0].new_empty((rows // ranks, a.rhs[0].shape[1]), dtype=a.out_dtype)


def fallback(a: ScaledMatmulReduceScatterArgs) -> Tensor:
    """Multiply and scale, then reduce-scatter with c10d."""
    partial = a.addend
    for lhs, rhs, lhs_scale, rhs_scale in zip(a.lhs, a.rhs, a.lhs_scales, a.rhs_scales, strict=True):
        partial = c10d.scaled_matmul(lhs, rhs, lhs_scale, rhs_scale, partial, a.product_dtype, a.fast_accum)
    assert partial is not None
    out = c10d.scatter_rows(partial, a.outer, a.group)
    return c10d.divide_for_avg(out, a.reduce_op, a.group).to(a.out_dtype)


def flops(a: ScaledMatmulReduceScatterArgs) -> Any:
    """Return the operations of the matmuls."""
    return flop_counts.count_products(a.lhs, a.rhs)


DEFINITION = OpDefinition(SCHEMA, ScaledMatmulReduceScatterArgs, fake, fallback, flops)

"""matmul_reduce_scatter: sum matmuls into a partial product and reduce-scatter it over the group.

Legend: R ranks of the group; o outer blocks; m rows of a shard in each block; P rows and Q columns of the product.

    partial [P, Q] = sum over t of lhs[t] [P, K_t] @ rhs[t] [K_t, Q]  (+ addend, [Q] or [P, Q])

    shard_dim_is_last=False    P = o * R * m     out [o * m, Q]    out[(o, i), :] = sum over ranks of partial[(o, me, i), :]
    shard_dim_is_last=True     outer is 1        out [P, Q / R]    out = sum over ranks of partial[:, me-th block]

The sum is taken in fp32 in rank order, divided by R for reduce_op "avg", and rounded once to out_dtype. `partial` is
returned if return_partial, else an empty tensor of shape [0].

`wire` is how chunks travel: "plain" in the matmuls' dtype, or "float8" (see scaled_matmul_reduce_scatter). The
fallback always sends the matmuls' dtype.

The products independent[i] = independent_lhs[i] @ independent_rhs[i] neither read nor feed the reduction. They are computed
while shards are on their way.
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
    "matmul_reduce_scatter(Tensor[] lhs, Tensor[] rhs, Tensor? addend, SymInt outer, bool shard_dim_is_last, str reduce_op, "
    "ScalarType out_dtype, bool return_partial, str wire, Tensor[] independent_lhs, Tensor[] independent_rhs, str strategy, "
    "str group, str site) -> (Tensor out, Tensor partial, Tensor[] independent)"
)


class MatmulReduceScatterArgs(NamedTuple):
    lhs: Sequence[Tensor]
    rhs: Sequence[Tensor]
    addend: Tensor | None
    outer: int
    shard_dim_is_last: bool
    reduce_op: str
    out_dtype: torch.dtype
    return_partial: bool
    wire: str
    independent_lhs: Sequence[Tensor]
    independent_rhs: Sequence[Tensor]
    strategy: str
    group: str
    site: str


def fake(a: MatmulReduceScatterArgs) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return empty results of the right sizes."""
    ranks = c10d.group_size(a.group)
    rows, cols = a.lhs[0].shape[0], a.rhs[0].shape[1]
    compat.check((cols if a.shard_dim_is_last else rows) % ranks == 0, lambda: "the product cannot be scattered evenly")
    out = (rows, cols // ranks) if a.shard_dim_is_last else (rows // ranks, cols)
    partial = a.lhs[0].new_empty((rows, cols) if a.return_partial else (0,))
    return a.lhs[0].new_empty(out, dtype=a.out_dtype), partial, c10d.empty_products(a.independent_lhs, a.independent_rhs)


def fallback(a: MatmulReduceScatterArgs) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Multiply, then reduce-scatter with c10d."""
    partial = c10d.sum_of_matmuls(a.lhs, a.rhs, a.addend)
    if a.shard_dim_is_last:
        out = c10d.scatter_cols(partial, a.group)
    else:
        out = c10d.scatter_rows(partial, a.outer, a.group)
    out = c10d.divide_for_avg(out, a.reduce_op, a.group).to(a.out_dtype)
    independent = c10d.products(a.independent_lhs, a.independent_rhs)
    return out, (partial if a.return_partial else partial.new_empty(0)), independent


def flops(a: MatmulReduceScatterArgs) -> Any:
    """Return the operations of the matmuls."""
    return flop_counts.count_products([*a.lhs, *a.independent_lhs], [*a.rhs, *a.independent_rhs])


DEFINITION = OpDefinition(SCHEMA, MatmulReduceScatterArgs, fake, fallback, flops)

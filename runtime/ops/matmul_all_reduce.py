"""matmul_all_reduce: sum matmuls into a partial product and all-reduce it over the group.

Legend: R ranks of the group; P rows and Q columns of the product.

    partial [P, Q] = sum over t of lhs[t] [P, K_t] @ rhs[t] [K_t, Q]  (+ addend, [Q] or [P, Q])
    out [P, Q]     = sum over ranks of partial

P may be any number: shard s of the reduction begins at row floor(P * s / R). The sum is taken in fp32 in rank order,
divided by R for reduce_op "avg", and rounded once to out_dtype. `partial` is returned if return_partial, else an
empty tensor of shape [0].

The products independent[i] = independent_lhs[i] @ independent_rhs[i] neither read nor feed the reduction. They are computed
while shards are on their way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import c10d_fallback as c10d
from . import flop_counts
from .definition import OpDefinition

SCHEMA = (
    "matmul_all_reduce(Tensor[] lhs, Tensor[] rhs, Tensor? addend, str reduce_op, ScalarType out_dtype, bool return_partial, "
    "Tensor[] independent_lhs, Tensor[] independent_rhs, str strategy, str group, str site) "
    "-> (Tensor out, Tensor partial, Tensor[] independent)"
)


class MatmulAllReduceArgs(NamedTuple):
    lhs: Sequence[Tensor]
    rhs: Sequence[Tensor]
    addend: Tensor | None
    reduce_op: str
    out_dtype: torch.dtype
    return_partial: bool
    independent_lhs: Sequence[Tensor]
    independent_rhs: Sequence[Tensor]
    strategy: str
    group: str
    site: str


def fake(a: MatmulAllReduceArgs) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return empty results of the right sizes."""
    sizes = (a.lhs[0].shape[0], a.rhs[0].shape[1])
    partial = a.lhs[0].new_empty(sizes if a.return_partial else (0,))
    return a.lhs[0].new_empty(sizes, dtype=a.out_dtype), partial, c10d.empty_products(a.independent_lhs, a.independent_rhs)


def fallback(a: MatmulAllReduceArgs) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Multiply, then all-reduce with c10d."""
    partial = c10d.sum_of_matmuls(a.lhs, a.rhs, a.addend)
    out = c10d.divide_for_avg(c10d.all_reduce(partial, a.group), a.reduce_op, a.group).to(a.out_dtype)
    independent = c10d.products(a.independent_lhs, a.independent_rhs)
    return out, (partial if a.return_partial else partial.new_empty(0)), independent


def flops(a: MatmulAllReduceArgs) -> Any:
    """Return the operations of the matmuls."""
    return flop_counts.count_products([*a.lhs, *a.independent_lhs], [*a.rhs, *a.independent_rhs])


DEFINITION = OpDefinition(SCHEMA, MatmulAllReduceArgs, fake, fallback, flops)

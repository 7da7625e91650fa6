"""matmul_all_reduce: sum matmuls into a partial product and all-reduce it over the group.

Legend: R ranks of the group; P rows and Q columns of the product.

    partial [P, Q] = sum over t of lhs[t] [P, K_t] @ rhs[t] [K_t, Q]  (+ addend, [Q] or [P, Q])
    out [P, Q]     = sum over ranks of partial

P may be any number: shard s of the reduction begins at row floor(P * s / R). The sum is taken in fp32 in rank order,
divided by R for reduce_op "avg", and rounded once to out_dtype. `partial` is returned if return_partial, else an
empty tensor of shape [0].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import c10d_fallback as c10d
from .definition import OpDefinition

SCHEMA = (
    "matmul_all_reduce(Tensor[] lhs, Tensor[] rhs, Tensor? addend, str reduce_op, ScalarType out_dtype, bool return_partial, "
    "str strategy, str group, str site) -> (Tensor out, Tensor partial)"
)


class MatmulAllReduceArgs(NamedTuple):
    lhs: Sequence[Tensor]
    rhs: Sequence[Tensor]
    addend: Tensor | None
    reduce_op: str
    out_dtype: torch.dtype
    return_partial: bool
    strategy: str
    group: str
    site: str


def fake(a: MatmulAllReduceArgs) -> tuple[Tensor, Tensor]:
    """Return empty results of the right sizes."""
    sizes = (a.lhs[0].shape[0], a.rhs[0].shape[1])
    return a.lhs[0].new_empty(sizes, dtype=a.out_dtype), a.lhs[0].new_empty(sizes if a.return_partial else (0,))


def fallback(a: MatmulAllReduceArgs) -> tuple[Tensor, Tensor]:
    """Multiply, then all-reduce with c10d."""
    partial = c10d.sum_of_matmuls(a.lhs, a.rhs, a.addend)
    out = c10d.divide_for_avg(c10d.all_reduce(partial, a.group), a.reduce_op, a.group).to(a.out_dtype)
    return out, (partial if a.return_partial else partial.new_empty(0))


DEFINITION = OpDefinition(SCHEMA, MatmulAllReduceArgs, fake, fallback)

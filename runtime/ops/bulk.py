"""bulk: run a collective concurrently with matmuls that are independent of it.

Legend: R ranks of the group; s rows of a shard.

    collective          input           out             (all on dim 0)
    "all_gather"        [s, ...]        [R * s, ...]
    "reduce_scatter"    [R * s, ...]    [s, ...]
    "all_reduce"        [...]           [...]

    outs[j] = lhs[j] @ rhs[j]

reduce_op is "sum" or "avg"; an all_gather ignores it. An all_gather also takes float8; the matmuls do not.

out has out_dtype, which of an all_gather is the input's. A reduction sends the input in its own dtype, takes the sum in
fp32 in rank order, divides it by R for "avg", and rounds once to out_dtype. An all_reduce sends its sums in out_dtype.
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
    "bulk(Tensor input, Tensor[] lhs, Tensor[] rhs, str collective, str reduce_op, ScalarType out_dtype, "
    "str strategy, str group, str site) -> (Tensor out, Tensor[] outs)"
)


class BulkArgs(NamedTuple):
    input: Tensor
    lhs: Sequence[Tensor]
    rhs: Sequence[Tensor]
    collective: str
    reduce_op: str
    out_dtype: torch.dtype
    strategy: str
    group: str
    site: str


def fake(a: BulkArgs) -> tuple[Tensor, list[Tensor]]:
    """Return empty results of the right sizes."""
    ranks, sizes = c10d.group_size(a.group), list(a.input.shape)
    if a.collective == "all_gather":
        sizes[0] = sizes[0] * ranks
    elif a.collective == "reduce_scatter":
        compat.check(sizes[0] % ranks == 0, lambda: "the input cannot be scattered evenly")
        sizes[0] = sizes[0] // ranks
    return a.input.new_empty(sizes, dtype=a.out_dtype), c10d.empty_products(a.lhs, a.rhs)


def fallback(a: BulkArgs) -> tuple[Tensor, list[Tensor]]:
    """Run the collective with c10d, then multiply."""
    if a.collective == "all_gather":
        out = c10d.all_gather(a.input, a.group)
    else:
        collective = c10d.reduce_scatter if a.collective == "reduce_scatter" else c10d.all_reduce
        wide = a.input.to(torch.promote_types(a.input.dtype, a.out_dtype))
        out = c10d.divide_for_avg(collective(wide, a.group), a.reduce_op, a.group).to(a.out_dtype)
    return out, c10d.products(a.lhs, a.rhs)


def flops(a: BulkArgs) -> Any:
    """Return the operations of the matmuls."""
    return flop_counts.count_products(a.lhs, a.rhs)


DEFINITION = OpDefinition(SCHEMA, BulkArgs, fake, fallback, flops)

"""all_gather_matmul: gather a shard over the group and multiply the gathered matrix by each operand.

Legend: R ranks of the group; o outer blocks; m rows of a shard in each block; Q columns.

`shard` is this rank's share, read in row-major order.

    shard_dim_is_last=False    shard [o, m, Q]          G [o * R * m, Q]    G[(o, r, i), :] = shard_r[o, i, :]
    shard_dim_is_last=True     shard [P, q], outer 1    G [P, R * q]        G[:, r*q:(r+1)*q] = shard_r

Consumer j multiplies G by B = operands[j]:

    transpose_gathered[j]   transpose_out[j]   outs[j]         B              shape of outs[j], always contiguous
    False                   False              G @ B           [cols(G), N]   [rows(G), N]
    False                   True               (G @ B)^T       [cols(G), N]   [N, rows(G)]
    True                    False              G^T @ B         [rows(G), N]   [cols(G), N]
    True                    True               (G^T @ B)^T     [rows(G), N]   [N, cols(G)]

A consumer contracts when its product sums over the gathered dim (transpose_gathered != shard_dim_is_last). Its shards
are accumulated in fp32 as they arrive and rounded once. Other consumers are computed block by block.

An operand has the shard's dtype or float32. A float32 operand widens the product: pieces are cast as they are
multiplied. The result has the operand's dtype. `gathered` is G (contiguous) if return_gathered, else an empty tensor
of shape [0].

The products independent_lhs[i] @ independent_rhs[i] neither read nor feed the gather. They are computed while shards are on
their way, and follow the consumers' in outs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ub_overlap import _torch_compat as compat

from . import c10d_fallback as c10d
from . import flop_counts
from .definition import OpDefinition

SCHEMA = (
    "all_gather_matmul(Tensor shard, Tensor[] operands, bool[] transpose_gathered, bool[] transpose_out, SymInt outer, "
    "bool shard_dim_is_last, bool return_gathered, Tensor[] independent_lhs, Tensor[] independent_rhs, str strategy, "
    "str group, str site) -> (Tensor gathered, Tensor[] outs)"
)


class AllGatherMatmulArgs(NamedTuple):
    shard: Tensor
    operands: Sequence[Tensor]
    transpose_gathered: Sequence[bool]
    transpose_out: Sequence[bool]
    outer: int
    shard_dim_is_last: bool
    return_gathered: bool
    independent_lhs: Sequence[Tensor]
    independent_rhs: Sequence[Tensor]
    strategy: str
    group: str
    site: str


def fake(a: AllGatherMatmulArgs) -> tuple[Tensor, list[Tensor]]:
    """Return empty results of the right sizes."""
    ranks = c10d.group_size(a.group)
    rows: Any = c10d.leading_rows(a.shard)
    cols: Any = a.shard.shape[-1]
    rows, cols = (rows, cols * ranks) if a.shard_dim_is_last else (rows * ranks, cols)
    outs = []
    for operand, transposed, out_transposed in zip(a.operands, a.transpose_gathered, a.transpose_out, strict=True):
        compat.check(operand.shape[0] == (rows if transposed else cols), lambda: "an operand does not fit the gathered matrix")
        sizes = (cols if transposed else rows, operand.shape[1])
        outs.append(operand.new_empty(sizes[::-1] if out_transposed else sizes))
    outs += c10d.empty_products(a.independent_lhs, a.independent_rhs)
    return a.shard.new_empty((rows, cols) if a.return_gathered else (0,)), outs


def fallback(a: AllGatherMatmulArgs) -> tuple[Tensor, list[Tensor]]:
    """Gather with c10d, then multiply."""
    if a.shard_dim_is_last:
        gathered = c10d.gather_cols(a.shard, a.group)
    else:
        gathered = c10d.gather_rows(a.shard, a.outer, a.group)
    outs = []
    for operand, transposed, out_transposed in zip(a.operands, a.transpose_gathered, a.transpose_out, strict=True):
        product = (gathered.T if transposed else gathered).to(operand.dtype) @ operand
        outs.append((product.T if out_transposed else product).contiguous())
    outs += c10d.products(a.independent_lhs, a.independent_rhs)
    return (gathered.contiguous() if a.return_gathered else a.shard.new_empty(0)), outs


def flops(a: AllGatherMatmulArgs) -> Any:
    """Return the operations of the matmuls."""
    count = flop_counts.count_gathered(a.shard, a.operands, a.group)
    return count + flop_counts.count_products(a.independent_lhs, a.independent_rhs)


DEFINITION = OpDefinition(SCHEMA, AllGatherMatmulArgs, fake, fallback, flops)

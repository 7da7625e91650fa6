"""The ops spelled with plain c10d collectives and matmuls: strategy "none", groups that have no transport of ours, a reference.

The collective runs in the matmuls' dtype, as the graph before the rewrite would have run it; "avg" is a sum divided at the end.
float8 numbers travel as bytes, and a float8 wire is not rounded to: sums travel in the products' dtype.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ub_overlap import _torch_compat

from ..fp8.numerics import FLOAT8


def _gather(shard: Tensor, group: str) -> Tensor:
    """[s, ...] -> [R * s, ...]"""
    if shard.dtype in FLOAT8:  # gloo has no such type
        return _gather(shard.contiguous().view(torch.uint8), group).view(shard.dtype)
    out = shard.new_empty((shard.shape[0] * _torch_compat.group_of(group).size(), *shard.shape[1:]))
    if out.numel():
        _torch_compat.gather_into(out, shard.contiguous(), group)
    return out


def _scatter(whole: Tensor, group: str) -> Tensor:
    """[R * s, ...] -> [s, ...], summed over ranks"""
    out = whole.new_empty((whole.shape[0] // _torch_compat.group_of(group).size(), *whole.shape[1:]))
    if out.numel():
        _torch_compat.scatter_into(out, whole.contiguous(), group)
    return out


def _reduce(whole: Tensor, group: str) -> Tensor:
    out = whole.clone(memory_format=torch.contiguous_format)
    if out.numel():
        _torch_compat.group_of(group).allreduce([out]).wait()
    return out


def _mean(total: Tensor, reduce_op: str, group: str) -> Tensor:
    return total / _torch_compat.group_of(group).size() if reduce_op == "avg" else total


def _gather_rows(shard: Tensor, outer: int, group: str) -> Tensor:
    """[o, m, Q], read flat -> G of docs/ops.md, [o * R * m, Q]"""
    rows, cols = math.prod(shard.shape[:-1]), shard.shape[-1]
    blocks = shard.reshape(outer, rows // outer if outer else 0, cols)
    gathered = _gather(blocks.unsqueeze(0), group)  # [R, o, m, Q]
    return gathered.transpose(0, 1).reshape(gathered.shape[0] * outer * blocks.shape[1], cols)


def all_gather_matmul(
    shard: Tensor, operands: Sequence[Tensor], modes: Sequence[int], outer: int, last: bool, keep: bool, group: str
) -> tuple[Tensor, list[Tensor]]:
    if last:
        ranks = _torch_compat.group_of(group).size()
        flat = shard.reshape(math.prod(shard.shape[:-1]), shard.shape[-1])
        whole = _gather(flat.unsqueeze(0), group).permute(1, 0, 2).reshape(flat.shape[0], ranks * flat.shape[1])
    else:
        whole = _gather_rows(shard, outer, group)
    outs = []
    for operand, mode in zip(operands, modes, strict=True):
        product = (whole.T if mode >= 2 else whole).to(operand.dtype) @ operand
        outs.append((product.T if mode % 2 else product).contiguous())
    return (whole.contiguous() if keep else shard.new_empty(0)), outs


def _aligned(scale: Tensor) -> Tensor:
    """cuBLAS wants scales one behind the other, from a multiple of 16 bytes on."""
    scale = scale.contiguous()
    return scale.clone() if scale.data_ptr() % 16 else scale


def scaled_product(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, addend: Tensor | None, dtype: torch.dtype, fast: bool
) -> Tensor:
    """(a [M, K] @ b [K, N]) * scales (+ addend) in fp32, rounded once; on CUDA by torch._scaled_mm, then the addend.

    a_scale: one element, or [M, 1]; b_scale: one element, or [1, N]. a and b of float64 stand for exact float8: no rounding.
    """
    each = b_scale.numel() != 1
    a_scale, b_scale = (
        (a_scale.reshape(-1, 1), b_scale.reshape(1, -1)) if each else (a_scale.reshape(1, 1), b_scale.reshape(1, 1))
    )
    if a.is_cuda and a.dtype in FLOAT8 and a.numel() and b.numel():
        wide = _torch_compat.scaled_mm(a, b, _aligned(a_scale), _aligned(b_scale), out_dtype=dtype, use_fast_accum=fast)
    else:
        sums = torch.float64 if a.dtype is torch.float64 else torch.float32
        wide = a.to(sums) @ b.to(sums) * a_scale * b_scale
    return wide.to(dtype) if addend is None else (wide.to(torch.promote_types(wide.dtype, torch.float32)) + addend).to(dtype)


def all_gather_scaled_matmul(
    shard: Tensor,
    shard_scale: Tensor,
    operands: Sequence[Tensor],
    operand_scales: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    outer: int,
    keep: bool,
    out_dtypes: Sequence[torch.dtype],
    fast_accum: bool,
    group: str,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    whole = _gather_rows(shard, outer, group)
    each = operand_scales[0].numel() != 1 if operands else shard_scale.numel() != 1
    scale = _gather_rows(shard_scale.reshape(-1, 1), outer, group) if each else shard_scale
    outs = [
        scaled_product(whole, operand, scale, operand_scale, bias, dtype, fast_accum)
        for operand, operand_scale, bias, dtype in zip(operands, operand_scales, biases, out_dtypes, strict=True)
    ]
    kept = scale if keep and each else scale.new_empty(0)
    return (whole.contiguous() if keep else shard.new_empty(0)), kept, outs


def _product(lhs: Sequence[Tensor], rhs: Sequence[Tensor], addend: Tensor | None) -> Tensor:
    partial = lhs[0] @ rhs[0] if addend is None else torch.addmm(addend, lhs[0], rhs[0])
    for a, b in zip(lhs[1:], rhs[1:], strict=True):
        partial = torch.addmm(partial, a, b)
    return partial


def scatter_rows(partial: Tensor, outer: int, group: str) -> Tensor:
    """[o * R * m, Q] -> [o * m, Q], summed over ranks"""
    ranks, (rows, cols) = _torch_compat.group_of(group).size(), partial.shape
    block = rows // (outer * ranks) if outer else 0
    share = partial.reshape(outer, ranks, block, cols).transpose(0, 1)  # [R, o, m, Q]
    return _scatter(share, group).reshape(outer * block, cols)


def matmul_reduce_scatter(
    lhs: Sequence[Tensor],
    rhs: Sequence[Tensor],
    addend: Tensor | None,
    outer: int,
    last: bool,
    reduce_op: str,
    out_dtype: torch.dtype,
    keep: bool,
    group: str,
) -> tuple[Tensor, Tensor]:
    partial = _product(lhs, rhs, addend)
    ranks = _torch_compat.group_of(group).size()
    rows, cols = partial.shape
    if last:
        share = partial.reshape(rows, ranks, cols // ranks).transpose(0, 1)  # [R, P, q]
        out = _scatter(share, group).reshape(rows, cols // ranks)
    else:
        out = scatter_rows(partial, outer, group)
    return _mean(out, reduce_op, group).to(out_dtype), (partial if keep else partial.new_empty(0))


def scaled_matmul_reduce_scatter(
    lhs: Sequence[Tensor],
    rhs: Sequence[Tensor],
    lhs_scales: Sequence[Tensor],
    rhs_scales: Sequence[Tensor],
    addend: Tensor | None,
    outer: int,
    reduce_op: str,
    product_dtype: torch.dtype,
    out_dtype: torch.dtype,
    fast_accum: bool,
    wire: str,
    group: str,
) -> Tensor:
    partial = addend
    for a, b, a_scale, b_scale in zip(lhs, rhs, lhs_scales, rhs_scales, strict=True):
        partial = scaled_product(a, b, a_scale, b_scale, partial, product_dtype, fast_accum)
    assert partial is not None
    return _mean(scatter_rows(partial, outer, group), reduce_op, group).to(out_dtype)


def matmul_all_reduce(
    lhs: Sequence[Tensor],
    rhs: Sequence[Tensor],
    addend: Tensor | None,
    reduce_op: str,
    out_dtype: torch.dtype,
    keep: bool,
    group: str,
) -> tuple[Tensor, Tensor]:
    partial = _product(lhs, rhs, addend)
    return _mean(_reduce(partial, group), reduce_op, group).to(out_dtype), (partial if keep else partial.new_empty(0))


def bulk(
    input: Tensor, lhs: Sequence[Tensor], rhs: Sequence[Tensor], collective: str, reduce_op: str, group: str
) -> tuple[Tensor, list[Tensor]]:
    if collective == "all_gather":
        out = _gather(input, group)
    else:
        out = _mean((_scatter if collective == "reduce_scatter" else _reduce)(input, group), reduce_op, group)
    return out, [a @ b for a, b in zip(lhs, rhs, strict=True)]


_OPS = {
    op.__name__: op
    for op in (
        all_gather_matmul,
        all_gather_scaled_matmul,
        matmul_reduce_scatter,
        scaled_matmul_reduce_scatter,
        matmul_all_reduce,
        bulk,
    )
}


@torch.no_grad()
def run(op: str, *args: Any) -> Any:
    """`op` by name: what C++ calls."""
    return _OPS[op](*args)

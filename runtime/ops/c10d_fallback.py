"""Helpers of the ops' fakes and c10d fallbacks: plain collectives and matmuls on the sizes that the ops have.

The collective runs in the matmuls' dtype, as the graph before the rewrite would have run it. "avg" is a sum that is
divided at the end. float8 numbers travel as bytes. A float8 wire is not emulated: sums travel in the products' dtype.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ub_overlap import _torch_compat

from ..fp8.numerics import FLOAT8
from ..session.host_layout import size_of
from .c10d_launch import start_all_gather, start_all_reduce, start_reduce_scatter
from .plain_collective import run_collective


def group_size(group: str) -> int:
    return size_of(group)


def leading_rows(t: Tensor) -> Any:
    """Return the product of all dims but the last, symbolic where they are."""
    rows: Any = 1
    for size in t.shape[:-1]:
        rows = rows * size
    return rows


def all_gather(shard: Tensor, group: str) -> Tensor:
    """[s, ...] -> [R * s, ...]"""
    if shard.dtype in FLOAT8:  # gloo has no such type
        return all_gather(shard.contiguous().view(torch.uint8), group).view(shard.dtype)
    out = shard.new_empty((shard.shape[0] * group_size(group), *shard.shape[1:]))
    if out.numel():
        run_collective(group, shard.device.type, lambda: start_all_gather(out, shard.contiguous(), group))
    return out


def reduce_scatter(full: Tensor, group: str) -> Tensor:
    """[R * s, ...] -> [s, ...], summed over ranks"""
    out = full.new_empty((full.shape[0] // group_size(group), *full.shape[1:]))
    if out.numel():
        run_collective(group, full.device.type, lambda: start_reduce_scatter(out, full.contiguous(), group))
    return out


def all_reduce(full: Tensor, group: str) -> Tensor:
    """Return a contiguous tensor of the same sizes, summed over ranks."""
    out = full.clone(memory_format=torch.contiguous_format)
    if out.numel():
        run_collective(group, full.device.type, lambda: start_all_reduce(out, group))
    return out


def divide_for_avg(total: Tensor, reduce_op: str, group: str) -> Tensor:
    return total / group_size(group) if reduce_op == "avg" else total


def gather_rows(shard: Tensor, outer: int, group: str) -> Tensor:
    """[o, m, Q], read in row-major order -> [o * R * m, Q]"""
    rows, cols = math.prod(shard.shape[:-1]), shard.shape[-1]
    blocks = shard.reshape(outer, rows // outer if outer else 0, cols)
    gathered = all_gather(blocks.unsqueeze(0), group)  # [R, o, m, Q]
    return gathered.transpose(0, 1).reshape(gathered.shape[0] * outer * blocks.shape[1], cols)


def gather_cols(shard: Tensor, group: str) -> Tensor:
    """[P, q], read in row-major order -> [P, R * q]"""
    flat = shard.reshape(math.prod(shard.shape[:-1]), shard.shape[-1])
    gathered = all_gather(flat.unsqueeze(0), group)  # [R, P, q]
    return gathered.permute(1, 0, 2).reshape(flat.shape[0], gathered.shape[0] * flat.shape[1])


def scatter_rows(partial: Tensor, outer: int, group: str) -> Tensor:
    """[o * R * m, Q] -> [o * m, Q], summed over ranks"""
    ranks, (rows, cols) = group_size(group), partial.shape
    block = rows // (outer * ranks) if outer else 0
    shards = partial.reshape(outer, ranks, block, cols).transpose(0, 1)  # [R, o, m, Q]
    return reduce_scatter(shards, group).reshape(outer * block, cols)


def scatter_cols(partial: Tensor, group: str) -> Tensor:
    """[P, R * q] -> [P, q], summed over ranks"""
    ranks, (rows, cols) = group_size(group), partial.shape
    shards = partial.reshape(rows, ranks, cols // ranks).transpose(0, 1)  # [R, P, q]
    return reduce_scatter(shards, group).reshape(rows, cols // ranks)


def products(lhs: Sequence[Tensor], rhs: Sequence[Tensor]) -> list[Tensor]:
    """Return each lhs[i] @ rhs[i]."""
    return [a @ b for a, b in zip(lhs, rhs, strict=True)]


def empty_products(lhs: Sequence[Tensor], rhs: Sequence[Tensor]) -> list[Tensor]:
    """Return empty tensors of the sizes of each lhs[i] @ rhs[i]."""
    return [a.new_empty((a.shape[0], b.shape[1])) for a, b in zip(lhs, rhs, strict=True)]


def sum_of_matmuls(lhs: Sequence[Tensor], rhs: Sequence[Tensor], addend: Tensor | None) -> Tensor:
    """Return the sum of lhs[t] @ rhs[t], plus `addend`."""
    partial = lhs[0] @ rhs[0] if addend is None else torch.addmm(addend, lhs[0], rhs[0])
    for a, b in zip(lhs[1:], rhs[1:], strict=True):
        partial = torch.addmm(partial, a, b)
    return partial


def scaled_matmul(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, addend: Tensor | None, dtype: torch.dtype, fast_accum: bool
) -> Tensor:
    """Return (a [M, K] @ b [K, N]) * scales (+ addend), computed in fp32 and rounded once.

    CUDA uses torch._scaled_mm and adds the addend afterwards. a_scale: one element, or [M, 1]; b_scale: one element, or [1, N].
    float64 operands stand for exact float8 values; nothing is rounded then.
    """
    by_row = b_scale.numel() != 1
    a_scale = a_scale.reshape(-1, 1) if by_row else a_scale.reshape(1, 1)
    b_scale = b_scale.reshape(1, -1) if by_row else b_scale.reshape(1, 1)
    if a.is_cuda and a.dtype in FLOAT8 and a.numel() and b.numel():
        a_scale, b_scale = _aligned(a_scale), _aligned(b_scale)
        wide = _torch_compat.scaled_mm(a, b, a_scale, b_scale, out_dtype=dtype, use_fast_accum=fast_accum)
    else:
        exact = torch.float64 if a.dtype is torch.float64 else torch.float32
        wide = a.to(exact) @ b.to(exact) * a_scale * b_scale
    return wide.to(dtype) if addend is None else (wide.to(torch.promote_types(wide.dtype, torch.float32)) + addend).to(dtype)


def _aligned(scale: Tensor) -> Tensor:
    """Return `scale` contiguous and at a multiple of 16 bytes, as cuBLAS needs it."""
    scale = scale.contiguous()
    return scale.clone() if scale.data_ptr() % 16 else scale

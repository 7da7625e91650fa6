"""The ops spelled with plain c10d collectives and matmuls: for groups that have no transport of ours, and as a reference.

The collective runs in the matmuls' dtype, as the graph before the rewrite would have run it; "avg" is a sum divided at the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ub_overlap import _torch_compat


def _gather(shard: Tensor, group: str) -> Tensor:
    """[s, ...] -> [R * s, ...]"""
    process_group = _torch_compat.group_of(group)
    out = shard.new_empty((shard.shape[0] * process_group.size(), *shard.shape[1:]))
    if out.numel():
        dist.all_gather_into_tensor(out, shard.contiguous(), group=process_group)
    return out


def _scatter(whole: Tensor, group: str) -> Tensor:
    """[R * s, ...] -> [s, ...], summed over ranks"""
    process_group = _torch_compat.group_of(group)
    out = whole.new_empty((whole.shape[0] // process_group.size(), *whole.shape[1:]))
    if out.numel():
        dist.reduce_scatter_tensor(out, whole.contiguous(), group=process_group)
    return out


def _reduce(whole: Tensor, group: str) -> Tensor:
    out = whole.clone(memory_format=torch.contiguous_format)
    if out.numel():
        dist.all_reduce(out, group=_torch_compat.group_of(group))
    return out


def _mean(total: Tensor, reduce_op: str, group: str) -> Tensor:
    return total / _torch_compat.group_of(group).size() if reduce_op == "avg" else total


def all_gather_matmul(
    shard: Tensor, operands: Sequence[Tensor], modes: Sequence[int], outer: int, last: bool, keep: bool, group: str
) -> tuple[Tensor, list[Tensor]]:
    rows, cols = math.prod(shard.shape[:-1]), shard.shape[-1]
    if last:
        ranks = _torch_compat.group_of(group).size()
        flat = shard.reshape(rows, cols)
        whole = _gather(flat.unsqueeze(0), group).permute(1, 0, 2).reshape(flat.shape[0], ranks * cols)
    else:
        blocks = shard.reshape(outer, rows // outer if outer else 0, cols)
        gathered = _gather(blocks.unsqueeze(0), group)  # [R, o, m, Q]
        whole = gathered.transpose(0, 1).reshape(gathered.shape[0] * outer * blocks.shape[1], cols)
    outs = []
    for operand, mode in zip(operands, modes, strict=True):
        product = (whole.T if mode >= 2 else whole).to(operand.dtype) @ operand
        outs.append((product.T if mode % 2 else product).contiguous())
    return (whole.contiguous() if keep else shard.new_empty(0)), outs


def _product(lhs: Sequence[Tensor], rhs: Sequence[Tensor], addend: Tensor | None) -> Tensor:
    partial = lhs[0] @ rhs[0] if addend is None else torch.addmm(addend, lhs[0], rhs[0])
    for a, b in zip(lhs[1:], rhs[1:], strict=True):
        partial = torch.addmm(partial, a, b)
    return partial


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
        block = rows // (outer * ranks) if outer else 0
        share = partial.reshape(outer, ranks, block, cols).transpose(0, 1)  # [R, o, m, Q]
        out = _scatter(share, group).reshape(outer * block, cols)
    return _mean(out, reduce_op, group).to(out_dtype), (partial if keep else partial.new_empty(0))


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


_OPS = {op.__name__: op for op in (all_gather_matmul, matmul_reduce_scatter, matmul_all_reduce, bulk)}


@torch.no_grad()
def run(op: str, *args: Any) -> tuple[Any, Any]:
    """`op` by name: what C++ calls."""
    return _OPS[op](*args)

"""strategy="none": c10d's functional collectives with gradients, so that a layer can be run without overlap to compare.

Written against the operators, which are the same in all versions of torch that are supported.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

C10D = torch.ops._c10d_functional


def all_gather(shard: Tensor, dim: int, group: str, ranks: int) -> Tensor:
    """[.., d, ..] -> [.., R * d, ..]"""
    return _Gather.apply(shard.movedim(dim, 0), group, ranks).movedim(0, dim)


def reduce_scatter(whole: Tensor, dim: int, reduce_op: str, group: str, ranks: int) -> Tensor:
    """[.., R * d, ..] -> [.., d, ..], summed over ranks"""
    out = _Scatter.apply(whole.movedim(dim, 0), group, ranks).movedim(0, dim)
    return out / ranks if reduce_op == "avg" else out


def all_reduce(x: Tensor, reduce_op: str, group: str, ranks: int) -> Tensor:
    """The sum over ranks; the gradient is taken to be the same on all of them."""
    out = _Reduce.apply(x, group)
    return out / ranks if reduce_op == "avg" else out


def _gathered(shard: Tensor, group: str, ranks: int) -> Tensor:
    if not shard.numel():  # backends refuse empty tensors
        return shard.new_empty((shard.shape[0] * ranks, *shard.shape[1:]))
    return C10D.wait_tensor(C10D.all_gather_into_tensor(shard.contiguous(), ranks, group))


def _scattered(whole: Tensor, group: str, ranks: int) -> Tensor:
    if not whole.numel():
        return whole.new_empty((whole.shape[0] // ranks, *whole.shape[1:]))
    return C10D.wait_tensor(C10D.reduce_scatter_tensor(whole.contiguous(), "sum", ranks, group))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, group: str, ranks: int) -> Tensor:
        ctx.group, ctx.ranks = group, ranks
        return _gathered(shard, group, ranks)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _scattered(grads[0], ctx.group, ctx.ranks), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: str, ranks: int) -> Tensor:
        ctx.group, ctx.ranks = group, ranks
        return _scattered(whole, group, ranks)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _gathered(grads[0], ctx.group, ctx.ranks), None, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        if not x.numel():
            return x.clone()
        return C10D.wait_tensor(C10D.all_reduce(x.contiguous(), "sum", group))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None

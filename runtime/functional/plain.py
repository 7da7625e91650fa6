"""strategy="none": c10d's functional collectives with gradients, to run a layer without overlap for comparison.

They call the operators directly, which are the same in all supported versions of torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

C10D = torch.ops._c10d_functional


def all_gather(shard: Tensor, dim: int, group: str, ranks: int) -> Tensor:
    """Gather [.., d, ..] -> [.., R * d, ..]."""
    return _Gather.apply(shard.movedim(dim, 0), group, ranks).movedim(0, dim)


def reduce_scatter(full: Tensor, dim: int, reduce_op: str, group: str, ranks: int) -> Tensor:
    """Sum over ranks and scatter [.., R * d, ..] -> [.., d, ..]."""
    out = _Scatter.apply(full.movedim(dim, 0), group, ranks).movedim(0, dim)
    return out / ranks if reduce_op == "avg" else out


def all_reduce(x: Tensor, reduce_op: str, group: str, ranks: int) -> Tensor:
    """Sum over ranks. The gradient is assumed to be the same on all of them."""
    out = _Reduce.apply(x, group)
    return out / ranks if reduce_op == "avg" else out


def _run_gather(shard: Tensor, group: str, ranks: int) -> Tensor:
    if not shard.numel():  # backends refuse empty tensors
        return shard.new_empty((shard.shape[0] * ranks, *shard.shape[1:]))
    return C10D.wait_tensor(C10D.all_gather_into_tensor(shard.contiguous(), ranks, group))


def _run_scatter(full: Tensor, group: str, ranks: int) -> Tensor:
    if not full.numel():
        return full.new_empty((full.shape[0] // ranks, *full.shape[1:]))
    return C10D.wait_tensor(C10D.reduce_scatter_tensor(full.contiguous(), "sum", ranks, group))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, group: str, ranks: int) -> Tensor:
        ctx.group, ctx.ranks = group, ranks
        return _run_gather(shard, group, ranks)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _run_scatter(grads[0], ctx.group, ctx.ranks), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, full: Tensor, group: str, ranks: int) -> Tensor:
        ctx.group, ctx.ranks = group, ranks
        return _run_scatter(full, group, ranks)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _run_gather(grads[0], ctx.group, ctx.ranks), None, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        if not x.numel():
            return x.clone()
        return C10D.wait_tensor(C10D.all_reduce(x.contiguous(), "sum", group))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None

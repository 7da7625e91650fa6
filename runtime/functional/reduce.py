"""matmul_all_reduce: tensor parallelism without sequence parallelism.

forward    y = all_reduce(x @ W + addend) + bias        one op: blocks are reduced while the next is computed
backward   dX = dY @ W^T, dW = X^T @ dY                 local: y is the same on all ranks, and so is its gradient
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import ops  # noqa: F401  (registers the ops)
from . import layout, plain
from .groups import Group, name_of, size_of

OPS = torch.ops.ub_overlap


def matmul_all_reduce(
    x: Tensor,
    weight: Tensor,
    group: Group = None,
    *,
    reduce_op: str = "sum",
    bias: Tensor | None = None,
    strategy: str = "pipelined",
    site: str | None = None,
) -> Tensor:
    """Compute all_reduce(x @ W), overlapped. x [.., K], weight [K, N] -> [.., N], equal on all ranks.

    Backward needs no communication: it assumes that y's gradient is equal on all ranks, as it is where the ranks use y alike.
    bias [N] is added once, after the sum. reduce_op, strategy, site: as in `matmul_reduce_scatter`.
    """
    call = layout.caller("matmul_all_reduce", site)
    layout.check_choice(call, "reduce_op", reduce_op, ("sum", "avg"))
    name = name_of(group)
    ranks = size_of(name)
    x, weight, bias = layout.autocast(x, weight, bias)
    layout.dim_of(call, "the last dim", -1, x)
    layout.check_weights(call, x.shape[-1], x, [weight])
    layout.bias_list(call, bias, [weight])
    if strategy == "none":
        out = plain.all_reduce(x @ weight, reduce_op, name, ranks)
    else:
        flat = x.reshape(-1, x.shape[-1])
        divide = ranks if reduce_op == "avg" else 1
        out = _MatmulReduce.apply(flat, weight, reduce_op, divide, strategy, name, call.site)
        out = out.reshape(*x.shape[:-1], weight.shape[1])
    return out if bias is None else out + bias


class _MatmulReduce(torch.autograd.Function):
    """x [P, K], weight [K, N] -> [P, N]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, reduce_op: str, divide: int, strategy: str, group: str, site: str
    ) -> Tensor:
        out, _, _ = OPS.matmul_all_reduce([x], [weight], None, reduce_op, x.dtype, False, [], [], strategy, group, site)
        ctx.divide = divide
        ctx.save_for_backward(x, weight)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # type: ignore[override]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grads[0] / ctx.divide if ctx.divide > 1 else grads[0]
        x_grad = grad @ weight.t() if ctx.needs_input_grad[0] else None
        weight_grad = x.t() @ grad if ctx.needs_input_grad[1] else None
        return x_grad, weight_grad, None, None, None, None, None

"""matmul_reduce_scatter: push each rank's block while the next is computed.

forward    y = reduce_scatter(sum_t x_t @ W_t + addend) + bias                       one scatter op
backward   G = all_gather(dY):  dX_t = G @ W_t^T,  dW_t = (G^T @ X_t)^T              one gather op, a consumer for each
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import ops  # noqa: F401  (registers the ops)
from . import layout, plain
from .groups import Group, name_of, size_of

OPS = torch.ops.ub_overlap


def matmul_reduce_scatter(
    x: Tensor | Sequence[Tensor],
    weights: Tensor | Sequence[Tensor],
    group: Group = None,
    *,
    scatter_dim: int = 0,
    reduce_op: str = "sum",
    bias: Tensor | None = None,
    addend: Tensor | None = None,
    strategy: str = "pipelined",
    site: str | None = None,
) -> Tensor:
    """Compute reduce_scatter(x @ W), with communication overlapped in forward and backward, weight gradients included.

    x [.., R * d, .., K], weight [K, N] (pass `linear.weight.t()`) -> this rank's shard [.., d, .., N] of the sum over ranks,
    along `scatter_dim`. With scatter_dim the last dim: [.., N / R]. With lists of x and weights of equal length, their products
    are summed first.

    reduce_op: "sum" or "avg". addend [N] or [.., N]: each rank's own, added before the sum. bias [N]: added once, after it.
    strategy, site: as in `all_gather_matmul`. strategy is also "pipelined:stripes=N" or "direct": one matmul stores each shard
    in the memory of the rank that owns it. The sum is in fp32 in rank order, rounded once.
    """
    call = layout.caller("matmul_reduce_scatter", site)
    layout.check_choice(call, "reduce_op", reduce_op, ("sum", "avg"))
    name = name_of(group)
    ranks = size_of(name)
    xs, ws, addend, bias = _terms(call, x, weights, addend, bias)
    cols = ws[0].shape[1]
    at = layout.scatter_layout(call, xs[0], cols, scatter_dim, ranks)
    layout.bias_list(call, bias, [ws[0][:, : cols // ranks] if at.shard_dim_is_last else ws[0]])

    if strategy == "none":
        out = plain.reduce_scatter(_product(xs, ws, addend), scatter_dim, reduce_op, name, ranks)
    else:
        flat = [t.reshape(-1, t.shape[-1]) for t in xs]
        extra = addend if addend is None or addend.dim() == 1 else addend.reshape(-1, cols)
        if layout.needs_autograd(*flat, *ws, extra):
            out = _MatmulScatter.apply(
                at.outer, at.shard_dim_is_last, reduce_op, ranks, strategy, name, call.site, len(flat), extra, *flat, *ws
            )
        else:
            out, _, _ = OPS.matmul_reduce_scatter(
                flat,
                ws,
                extra,
                at.outer,
                at.shard_dim_is_last,
                reduce_op,
                flat[0].dtype,
                False,
                "plain",
                [],
                [],
                strategy,
                name,
                call.site,
            )
        out = out.reshape(*at.shape, cols // ranks if at.shard_dim_is_last else cols)
    return out if bias is None else out + bias


def _terms(
    call: layout.Caller,
    x: Tensor | Sequence[Tensor],
    weights: Tensor | Sequence[Tensor],
    addend: Tensor | None,
    bias: Tensor | None,
) -> tuple[list[Tensor], list[Tensor], Tensor | None, Tensor | None]:
    """Return the terms of the sum, checked against each other and cast as autocast requires."""
    xs, ws = layout.as_list(x), layout.as_list(weights)
    if not xs or len(xs) != len(ws):
        call.refuse("inputs and weights are not the terms of a sum", f"{len(xs)} and {len(ws)}", "as many of both, one or more")
    cast: list[Any] = layout.autocast(*xs, *ws, addend, bias)
    xs, ws, (addend, bias) = cast[: len(xs)], cast[len(xs) : 2 * len(xs)], cast[2 * len(xs) :]
    lead, cols = xs[0].shape[:-1], ws[0].shape[-1]
    for i, (a, w) in enumerate(zip(xs, ws, strict=True)):
        if a.dim() < 2 or a.shape[:-1] != lead:
            call.refuse(f"input {i} does not fit", list(a.shape), f"{[*lead]} followed by K, two dims or more")
        layout.check_weights(call, a.shape[-1], a, [w])
        layout.check_same(call, f"input {i}", a, xs[0])
        if w.shape[1] != cols:
            call.refuse(f"weight {i} has another width than the first", list(w.shape), f"[{w.shape[0]}, {cols}]")
    if addend is not None:
        layout.check_same(call, "the addend", addend, xs[0])
        if tuple(addend.shape) not in ((cols,), (*lead, cols)):
            call.refuse("the addend does not fit", list(addend.shape), f"[{cols}] or {[*lead, cols]}")
    return xs, ws, addend, bias


def _product(xs: list[Tensor], ws: list[Tensor], addend: Tensor | None) -> Tensor:
    total = xs[0] @ ws[0]
    for a, w in zip(xs[1:], ws[1:], strict=True):
        total = total + a @ w
    return total if addend is None else total + addend


class _MatmulScatter(torch.autograd.Function):
    """x_t [o * R * m, K_t], weights [K_t, N], addend [N] or [o * R * m, N] -> [o * m, N].

    With shard_dim_is_last: -> [P, N / R].
    """

    @staticmethod
    def forward(
        ctx: Any,
        outer: int,
        shard_dim_is_last: bool,
        reduce_op: str,
        ranks: int,
        strategy: str,
        group: str,
        site: str,
        count: int,
        addend: Tensor | None,
        *terms: Tensor,
    ) -> Tensor:
        lhs, rhs = list(terms[:count]), list(terms[count:])
        out, _, _ = OPS.matmul_reduce_scatter(
            lhs, rhs, addend, outer, shard_dim_is_last, reduce_op, lhs[0].dtype, False, "plain", [], [], strategy, group, site
        )
        ctx.outer, ctx.shard_dim_is_last, ctx.count = outer, shard_dim_is_last, count
        ctx.divide = ranks if reduce_op == "avg" else 1
        is_of_gathers = "stripes" not in strategy and strategy != "direct"
        gather_strategy = strategy if is_of_gathers else "pipelined"
        ctx.strategy, ctx.group, ctx.site = gather_strategy, group, f"{site}.backward"
        ctx.addend_is_row = addend is not None and addend.dim() == 1
        # An input is saved only if its weight needs a gradient, and vice versa.
        needs_grad = ctx.needs_input_grad[9:]
        ctx.saved = [i for i in range(2 * count) if needs_grad[(i + count) % (2 * count)]]
        ctx.save_for_backward(*(terms[i] for i in ctx.saved))
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # type: ignore[override]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        grad = grads[0] / ctx.divide if ctx.divide > 1 else grads[0]
        count = ctx.count
        operands, transpose = [], []
        for i, tensor in zip(ctx.saved, ctx.saved_tensors, strict=True):
            is_weight = i >= count
            operands.append(tensor.t() if is_weight else tensor)
            transpose.append(not is_weight)  # (G^T @ X)^T for a weight
        keep = ctx.needs_input_grad[8]
        gathered, outs = OPS.all_gather_matmul(
            grad,
            operands,
            transpose,
            transpose,
            ctx.outer,
            ctx.shard_dim_is_last,
            keep,
            [],
            [],
            ctx.strategy,
            ctx.group,
            ctx.site,
        )
        term_grads: list[Tensor | None] = [None] * (2 * count)
        for i, out in zip(ctx.saved, outs, strict=True):
            term_grads[(i + count) % (2 * count)] = out
        addend_grad = None
        if keep:
            addend_grad = gathered.sum(0) if ctx.addend_is_row else gathered
        return (None, None, None, None, None, None, None, None, addend_grad, *term_grads)

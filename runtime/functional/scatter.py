"""matmul_reduce_scatter: each rank's block is sent while the next is computed.

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
    """reduce_scatter(x @ W), the communication hidden behind the matmul; so is that of backward, weight gradients included.

    x [.., R * d, .., K], weight [K, N] (pass `linear.weight.t()`) -> this rank's [.., d, .., N] of the sum over ranks, shards
    along `scatter_dim`; with scatter_dim the last dim, [.., N / R]. Lists of x and weights of equal length: their products are
    summed first.

    reduce_op: "sum" or "avg". addend [N] or [.., N]: each rank's own, added before the sum. bias [N]: added once, after it.
    strategy, site: as in `all_gather_matmul`. Summed in fp32 in rank order, rounded once.
    """
    who = layout.caller("matmul_reduce_scatter", site)
    layout.one_of(who, "reduce_op", reduce_op, ("sum", "avg"))
    name = name_of(group)
    ranks = size_of(name)
    xs, ws, addend, bias = _terms(who, x, weights, addend, bias)
    cols = ws[0].shape[1]
    at = layout.scattered(who, xs[0], cols, scatter_dim, ranks)
    layout.biases(who, bias, [ws[0][:, : cols // ranks] if at.last else ws[0]])

    if strategy == "none":
        out = plain.reduce_scatter(_product(xs, ws, addend), scatter_dim, reduce_op, name, ranks)
    else:
        flat = [t.reshape(-1, t.shape[-1]) for t in xs]
        extra = addend if addend is None or addend.dim() == 1 else addend.reshape(-1, cols)
        if layout.differentiable(*flat, *ws, extra):
            out = _MatmulScatter.apply(
                at.outer, at.last, reduce_op, ranks, strategy, name, who.site, len(flat), extra, *flat, *ws
            )
        else:
            out, _ = OPS.matmul_reduce_scatter(
                flat, ws, extra, at.outer, at.last, reduce_op, flat[0].dtype, False, "plain", strategy, name, who.site
            )
        out = out.reshape(*at.shape, cols // ranks if at.last else cols)
    return out if bias is None else out + bias


def _terms(
    who: layout.Caller,
    x: Tensor | Sequence[Tensor],
    weights: Tensor | Sequence[Tensor],
    addend: Tensor | None,
    bias: Tensor | None,
) -> tuple[list[Tensor], list[Tensor], Tensor | None, Tensor | None]:
    """The terms of the sum, checked against each other, in the dtype that autocast asks for."""
    xs, ws = layout.listed(x), layout.listed(weights)
    if not xs or len(xs) != len(ws):
        who.refuse("inputs and weights are not the terms of a sum", f"{len(xs)} and {len(ws)}", "as many of both, one or more")
    cast: list[Any] = layout.autocast(*xs, *ws, addend, bias)
    xs, ws, (addend, bias) = cast[: len(xs)], cast[len(xs) : 2 * len(xs)], cast[2 * len(xs) :]
    lead, cols = xs[0].shape[:-1], ws[0].shape[-1]
    for i, (a, w) in enumerate(zip(xs, ws, strict=True)):
        if a.dim() < 2 or a.shape[:-1] != lead:
            who.refuse(f"input {i} does not fit", list(a.shape), f"{[*lead]} and K behind, two dims or more")
        layout.operands(who, a.shape[-1], a, [w])
        layout.same(who, f"input {i}", a, xs[0])
        if w.shape[1] != cols:
            who.refuse(f"weight {i} has another width than the first", list(w.shape), f"[{w.shape[0]}, {cols}]")
    if addend is not None:
        layout.same(who, "the addend", addend, xs[0])
        if tuple(addend.shape) not in ((cols,), (*lead, cols)):
            who.refuse("the addend does not fit", list(addend.shape), f"[{cols}] or {[*lead, cols]}")
    return xs, ws, addend, bias


def _product(xs: list[Tensor], ws: list[Tensor], addend: Tensor | None) -> Tensor:
    total = xs[0] @ ws[0]
    for a, w in zip(xs[1:], ws[1:], strict=True):
        total = total + a @ w
    return total if addend is None else total + addend


class _MatmulScatter(torch.autograd.Function):
    """x_t [o * R * m, K_t], weights [K_t, N], addend [N] or [o * R * m, N] -> [o * m, N], or with last [P, N / R]."""

    @staticmethod
    def forward(
        ctx: Any,
        outer: int,
        last: bool,
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
        out, _ = OPS.matmul_reduce_scatter(
            lhs, rhs, addend, outer, last, reduce_op, lhs[0].dtype, False, "plain", strategy, group, site
        )
        ctx.outer, ctx.last, ctx.count, ctx.divide = outer, last, count, ranks if reduce_op == "avg" else 1
        gather = "pipelined" if "stripes" in strategy else strategy  # a gather has none
        ctx.strategy, ctx.group, ctx.site = gather, group, f"{site}.backward"
        ctx.row = addend is not None and addend.dim() == 1
        # An input is kept only for its weight's gradient, and the other way round.
        wants = ctx.needs_input_grad[9:]
        ctx.kept = [i for i in range(2 * count) if wants[(i + count) % (2 * count)]]
        ctx.save_for_backward(*(terms[i] for i in ctx.kept))
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # type: ignore[override]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        grad = grads[0] / ctx.divide if ctx.divide > 1 else grads[0]
        count = ctx.count
        operands, transpose = [], []
        for i, tensor in zip(ctx.kept, ctx.saved_tensors, strict=True):
            weight = i >= count
            operands.append(tensor.t() if weight else tensor)
            transpose.append(not weight)  # (G^T @ X)^T for a weight
        keep = ctx.needs_input_grad[8]
        gathered, outs = OPS.all_gather_matmul(
            grad, operands, transpose, transpose, ctx.outer, ctx.last, keep, ctx.strategy, ctx.group, ctx.site
        )
        found: list[Tensor | None] = [None] * (2 * count)
        for i, out in zip(ctx.kept, outs, strict=True):
            found[(i + count) % (2 * count)] = out
        extra = None
        if keep:
            extra = gathered.sum(0) if ctx.row else gathered
        return (None, None, None, None, None, None, None, None, extra, *found)

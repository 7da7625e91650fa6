"""all_gather_matmul: each shard is multiplied as it arrives.

forward    G = all_gather(shard), y_j = G @ W_j                                      one gather op

backward   dX = reduce_scatter(sum_j dY_j @ W_j^T),  dW_j = G^T @ dY_j

               where G lies shard after shard (gather_dim 0): the collectives run beside whole matmuls
                   save="shard"     all_gather(shard) beside dY @ W^T     |   then in both: reduce_scatter of that
                   save="gathered"  dY @ W^T, nothing to wait for         |   product beside all dW_j
               elsewhere, or where only one of the two is wanted: the same in pieces
                   a scatter op for dX; for dW a gather op that sums over the arriving shards, or matmuls on the kept G
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import ops  # noqa: F401  (registers the ops)
from . import layout, plain
from .groups import Group, name_of, size_of
from .layout import Caller

OPS = torch.ops.ub_overlap


def all_gather_matmul(
    shard: Tensor,
    weights: Tensor | Sequence[Tensor],
    group: Group = None,
    *,
    gather_dim: int = 0,
    bias: Tensor | Sequence[Tensor | None] | None = None,
    return_gathered: bool = False,
    strategy: str = "pipelined",
    save: str = "gathered",
    site: str | None = None,
) -> Any:
    """all_gather(shard) @ W for one or more weights, the communication hidden behind the matmuls; so is that of backward.

    `shard` [.., d, .., K] is this rank's share along `gather_dim`; weights are [K, N] (pass `linear.weight.t()`), a rank's own.
    Returns [.., R * d, .., N]: a tensor for a tensor, a list for a list. With gather_dim the last dim, K is what is gathered:
    shard [.., K / R].

    bias: [N], or one (or None) a weight; added to the product. return_gathered: returns (gathered, product) instead.
    save: what backward keeps where a weight wants a gradient: "gathered", or "shard", which is gathered again (overlapped).
    strategy: "pipelined", "pipelined:chunks=N", or "none": a plain collective, then matmuls.
    site: a name for errors and statistics, the same on all ranks.

    All ranks of the group make the same calls with the same sizes. OptionError for what does not fit.
    """
    who = layout.caller("all_gather_matmul", site)
    layout.one_of(who, "save", save, ("gathered", "shard"))
    name = name_of(group)
    ranks = size_of(name)
    tensors = layout.listed(weights)
    given = layout.biases(who, bias, tensors)
    shard, *cast = layout.autocast(shard, *tensors, *given)
    tensors, given = cast[: len(tensors)], cast[len(tensors) :]
    at = layout.gathered(who, shard, gather_dim, ranks)
    inner = shard.shape[-1] * ranks if at.last else shard.shape[-1]
    layout.operands(who, inner, shard, tensors)

    if strategy == "none":
        whole = plain.all_gather(shard, gather_dim, name, ranks)
        outs = [whole @ w for w in tensors]
    else:
        flat = shard.reshape(-1, shard.shape[-1])
        found = _run(flat, tensors, at, return_gathered, strategy, save, name, who)
        outs = [out.reshape(*at.shape, w.shape[1]) for out, w in zip(found, tensors, strict=False)]
        whole = found[-1].reshape(*at.shape, inner) if return_gathered else shard
    outs = [out if b is None else out + b for out, b in zip(outs, given, strict=True)]
    product = outs[0] if isinstance(weights, Tensor) else outs
    return (whole, product) if return_gathered else product


def _run(
    shard: Tensor,
    weights: list[Tensor],
    at: layout.Layout,
    return_gathered: bool,
    strategy: str,
    save: str,
    group: str,
    who: Caller,
) -> Sequence[Tensor]:
    """The products [rows, N], and the gathered matrix behind them where it is asked for."""
    if layout.differentiable(shard, *weights):
        keep = save if any(w.requires_grad for w in weights) else "nothing"
        return _GatherMatmul.apply(shard, at.outer, at.last, return_gathered, strategy, keep, group, who.site, *weights)
    no_transpose = [False] * len(weights)
    gathered, outs = OPS.all_gather_matmul(
        shard, weights, no_transpose, no_transpose, at.outer, at.last, return_gathered, strategy, group, who.site
    )
    return [*outs, gathered] if return_gathered else outs


class _GatherMatmul(torch.autograd.Function):
    """shard [o * m, K] or, with last, [P, K / R]; weights [K, N_j] -> products [rows, N_j] (and G)."""

    @staticmethod
    def forward(
        ctx: Any,
        shard: Tensor,
        outer: int,
        last: bool,
        return_gathered: bool,
        strategy: str,
        keep: str,
        group: str,
        site: str,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        if not torch.compiler.is_compiling():  # there, zeros stand for gradients that do not come
            ctx.set_materialize_grads(False)
        no_transpose, keep_gathered = [False] * len(weights), keep == "gathered" or return_gathered
        gathered, outs = OPS.all_gather_matmul(
            shard, list(weights), no_transpose, no_transpose, outer, last, keep_gathered, strategy, group, site
        )
        ctx.outer, ctx.last, ctx.return_gathered, ctx.keep = outer, last, return_gathered, keep
        ctx.strategy, ctx.group, ctx.site = strategy, group, f"{site}.backward"
        kept = {"gathered": [gathered], "shard": [shard]}.get(keep, [])
        ctx.save_for_backward(*weights, *kept)
        return (*outs, gathered) if return_gathered else tuple(outs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # type: ignore[override]
        ctx: Any, *grads: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        weights = saved if ctx.keep == "nothing" else saved[:-1]
        kept = None if ctx.keep == "nothing" else saved[-1]
        whole_grad = grads[len(weights)] if ctx.return_gathered else None
        products = [None if grad is None else layout.steady(grad) for grad in grads[: len(weights)]]
        wanted = [j for j, want in enumerate(ctx.needs_input_grad[8:]) if want and products[j] is not None]
        terms = [(grad, w) for grad, w in zip(products, weights, strict=True) if grad is not None]

        shard_grad: Tensor | None = None
        weight_grads: list[Tensor | None] = [None] * len(weights)
        whole_matmuls = ctx.outer == 1 and not ctx.last and bool(wanted)
        if ctx.needs_input_grad[0] and whole_matmuls:
            shard_grad, found = _beside(ctx, kept, terms, whole_grad, [products[j] for j in wanted])
        else:
            if ctx.needs_input_grad[0]:
                shard_grad = _scatter(ctx, terms, whole_grad, weights)
            found = _weight_grads(ctx, kept, [products[j] for j in wanted])
        for j, grad in zip(wanted, found, strict=True):
            weight_grads[j] = grad
        return (shard_grad, None, None, None, None, None, None, None, *weight_grads)


def _beside(
    ctx: Any, kept: Tensor | None, terms: list[tuple[Tensor, Tensor]], whole_grad: Tensor | None, products: list[Any]
) -> tuple[Tensor, list[Tensor]]:
    """The collectives beside whole matmuls. Returns dX [m, K] and dW of every one of `products`."""
    assert kept is not None, "some weight wants a gradient"
    gathered, total = kept, whole_grad
    if ctx.keep == "shard":  # the longest matmul hides most
        terms = sorted(terms, key=lambda term: -term[1].shape[1])
        grad, weight = terms[0]
        gathered, (first,) = OPS.bulk(kept, [grad], [weight.t()], "all_gather", "sum", "bulk", ctx.group, f"{ctx.site}.gather")
        total, terms = first if total is None else total + first, terms[1:]
    for grad, weight in terms:
        total = grad @ weight.t() if total is None else torch.addmm(total, grad, weight.t())
    lhs = [gathered.t()] * len(products)
    return OPS.bulk(total, lhs, products, "reduce_scatter", "sum", "bulk", ctx.group, ctx.site)


def _scatter(ctx: Any, terms: list[tuple[Tensor, Tensor]], whole_grad: Tensor | None, weights: Sequence[Tensor]) -> Tensor:
    """dX alone: one scatter op with a term for every product that has a gradient."""
    lhs, rhs = [grad for grad, _ in terms], [weight.t() for _, weight in terms]
    if not terms:  # only the gathered tensor was used: a sum over nothing, plus its gradient
        assert whole_grad is not None
        lhs, rhs = [whole_grad.new_empty((whole_grad.shape[0], 0))], [whole_grad.new_empty((0, whole_grad.shape[1]))]
    out, _ = OPS.matmul_reduce_scatter(
        lhs, rhs, whole_grad, ctx.outer, ctx.last, "sum", weights[0].dtype, False, "plain", ctx.strategy, ctx.group, ctx.site
    )
    return out


def _weight_grads(ctx: Any, kept: Tensor | None, products: list[Any]) -> list[Tensor]:
    """G^T @ dY for each of `products`."""
    if not products:
        return []
    assert kept is not None
    if ctx.keep == "gathered":
        return [kept.t() @ grad for grad in products]
    site, transpose_gathered, transpose_out = f"{ctx.site}.gather", [True] * len(products), [False] * len(products)
    _, outs = OPS.all_gather_matmul(
        kept, products, transpose_gathered, transpose_out, ctx.outer, ctx.last, False, ctx.strategy, ctx.group, site
    )
    return outs

"""all_gather_matmul: multiply each shard as it arrives.

forward    G = all_gather(shard), y_j = G @ W_j                                      one gather op

backward   dX = reduce_scatter(sum_j dY_j @ W_j^T),  dW_j = G^T @ dY_j

               shards of G contiguous (gather_dim 0): collectives run concurrently with full matmuls
                   save="shard"     all_gather(shard) || dY @ W^T         |   then in both: reduce_scatter of that
                   save="gathered"  dY @ W^T, no wait                     |   product || all dW_j
               otherwise, or where only one of dX and dW is needed: in pieces
                   a scatter op for dX; for dW a gather op that sums over the arriving shards, or matmuls on the saved G
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from .. import ops  # noqa: F401  (registers the ops)
from . import layout, plain
from .groups import Group, name_of, size_of
from .layout import Caller, Tensors

OPS = torch.ops.ub_overlap


@overload
def all_gather_matmul(
    shard: Tensor,
    weights: Tensors,
    group: Group = None,
    *,
    gather_dim: int = 0,
    bias: Tensor | Sequence[Tensor | None] | None = None,
    return_gathered: Literal[False] = False,
    strategy: str = "pipelined",
    save: str = "gathered",
    site: str | None = None,
) -> Tensors: ...
@overload
def all_gather_matmul(
    shard: Tensor,
    weights: Tensors,
    group: Group = None,
    *,
    gather_dim: int = 0,
    bias: Tensor | Sequence[Tensor | None] | None = None,
    return_gathered: Literal[True],
    strategy: str = "pipelined",
    save: str = "gathered",
    site: str | None = None,
) -> tuple[Tensor, Tensors]: ...
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
    """Compute all_gather(shard) @ W for one or more weights, with communication overlapped in forward and backward.

    `shard` [.., d, .., K]: this rank's shard along `gather_dim`. Weights [K, N] (pass `linear.weight.t()`) are each rank's own.
    Return [.., R * d, .., N]: a tensor for a tensor, a list for a list. With gather_dim the last dim, K is gathered: shard
    [.., K / R].

    bias: [N], or one (or None) per weight; added to the product. return_gathered: return (gathered, product) instead.
    save: what is saved for backward where a weight needs a gradient: "gathered", or "shard", which is gathered again
    (overlapped).
    strategy: "pipelined", "pipelined:chunks=N", or "none": a plain collective, then matmuls.
    site: a name for errors and statistics, the same on all ranks.

    All ranks of the group must make the same calls with the same sizes. OptionError for invalid arguments.
    """
    call = layout.caller("all_gather_matmul", site)
    layout.check_choice(call, "save", save, ("gathered", "shard"))
    name = name_of(group)
    ranks = size_of(name)
    tensors = layout.as_list(weights)
    biases = layout.bias_list(call, bias, tensors)
    shard, *cast = layout.autocast(shard, *tensors, *biases)
    tensors, biases = cast[: len(tensors)], cast[len(tensors) :]
    at = layout.gather_layout(call, shard, gather_dim, ranks)
    inner = shard.shape[-1] * ranks if at.shard_dim_is_last else shard.shape[-1]
    layout.check_weights(call, inner, shard, tensors)

    if strategy == "none":
        gathered = plain.all_gather(shard, gather_dim, name, ranks)
        outs = [gathered @ w for w in tensors]
    else:
        flat = shard.reshape(-1, shard.shape[-1])
        results = _run(flat, tensors, at, return_gathered, strategy, save, name, call)
        outs = [out.reshape(*at.shape, w.shape[1]) for out, w in zip(results, tensors, strict=False)]
        gathered = results[-1].reshape(*at.shape, inner) if return_gathered else shard
    outs = [out if b is None else out + b for out, b in zip(outs, biases, strict=True)]
    product = outs[0] if isinstance(weights, Tensor) else outs
    return (gathered, product) if return_gathered else product


def _run(
    shard: Tensor,
    weights: list[Tensor],
    at: layout.Layout,
    return_gathered: bool,
    strategy: str,
    save: str,
    group: str,
    call: Caller,
) -> Sequence[Tensor]:
    """Return the products [rows, N], then the gathered matrix if requested."""
    if layout.needs_autograd(shard, *weights):
        saved = save if any(w.requires_grad for w in weights) else "nothing"
        return _GatherMatmul.apply(
            shard, at.outer, at.shard_dim_is_last, return_gathered, strategy, saved, group, call.site, *weights
        )
    no_transpose = [False] * len(weights)
    gathered, outs = OPS.all_gather_matmul(
        shard,
        weights,
        no_transpose,
        no_transpose,
        at.outer,
        at.shard_dim_is_last,
        return_gathered,
        [],
        [],
        strategy,
        group,
        call.site,
    )
    return [*outs, gathered] if return_gathered else outs


class _GatherMatmul(torch.autograd.Function):
    """shard [o * m, K] or, with shard_dim_is_last, [P, K / R]; weights [K, N_j] -> products [rows, N_j] (and G)."""

    @staticmethod
    def forward(
        ctx: Any,
        shard: Tensor,
        outer: int,
        shard_dim_is_last: bool,
        return_gathered: bool,
        strategy: str,
        saved: str,
        group: str,
        site: str,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        if not torch.compiler.is_compiling():  # compiled graphs get zeros for missing gradients
            ctx.set_materialize_grads(False)
        no_transpose, keep_gathered = [False] * len(weights), saved == "gathered" or return_gathered
        gathered, outs = OPS.all_gather_matmul(
            shard,
            list(weights),
            no_transpose,
            no_transpose,
            outer,
            shard_dim_is_last,
            keep_gathered,
            [],
            [],
            strategy,
            group,
            site,
        )
        ctx.outer, ctx.shard_dim_is_last, ctx.return_gathered, ctx.saved = outer, shard_dim_is_last, return_gathered, saved
        ctx.strategy, ctx.group, ctx.site = strategy, group, f"{site}.backward"
        activations = {"gathered": [gathered], "shard": [shard]}.get(saved, [])
        ctx.save_for_backward(*weights, *activations)
        return (*outs, gathered) if return_gathered else tuple(outs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # type: ignore[override]
        ctx: Any, *grads: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        weights = tensors if ctx.saved == "nothing" else tensors[:-1]
        activation = None if ctx.saved == "nothing" else tensors[-1]
        gathered_grad = grads[len(weights)] if ctx.return_gathered else None
        products = [None if grad is None else layout.as_dense_matrix(grad) for grad in grads[: len(weights)]]
        needed = [j for j, needs_grad in enumerate(ctx.needs_input_grad[8:]) if needs_grad and products[j] is not None]
        terms = [(grad, w) for grad, w in zip(products, weights, strict=True) if grad is not None]

        shard_grad: Tensor | None = None
        weight_grads: list[Tensor | None] = [None] * len(weights)
        is_contiguous = ctx.outer == 1 and not ctx.shard_dim_is_last and bool(needed)
        if ctx.needs_input_grad[0] and is_contiguous:
            shard_grad, needed_grads = _all_grads(ctx, activation, terms, gathered_grad, [products[j] for j in needed])
        else:
            if ctx.needs_input_grad[0]:
                shard_grad = _scatter(ctx, terms, gathered_grad, weights)
            needed_grads = _weight_grads(ctx, activation, [products[j] for j in needed])
        for j, grad in zip(needed, needed_grads, strict=True):
            weight_grads[j] = grad
        return (shard_grad, None, None, None, None, None, None, None, *weight_grads)


def _all_grads(
    ctx: Any, activation: Tensor | None, terms: list[tuple[Tensor, Tensor]], gathered_grad: Tensor | None, products: list[Any]
) -> tuple[Tensor, list[Tensor]]:
    """Return dX [m, K] and dW of each of `products`, the collectives concurrent with full matmuls."""
    assert activation is not None, "a weight needs a gradient"
    gathered, total = activation, gathered_grad
    if ctx.saved == "shard":  # the longest matmul hides the most communication
        terms = sorted(terms, key=lambda term: -term[1].shape[1])
        grad, weight = terms[0]
        site = f"{ctx.site}.gather"
        args = ([grad], [weight.t()], "all_gather", "sum", activation.dtype, "bulk")
        gathered, (first,) = OPS.bulk(activation, *args, ctx.group, site)
        total, terms = first if total is None else total + first, terms[1:]
    for grad, weight in terms:
        total = grad @ weight.t() if total is None else torch.addmm(total, grad, weight.t())
    lhs = [gathered.t()] * len(products)
    return OPS.bulk(total, lhs, products, "reduce_scatter", "sum", total.dtype, "bulk", ctx.group, ctx.site)


def _scatter(ctx: Any, terms: list[tuple[Tensor, Tensor]], gathered_grad: Tensor | None, weights: Sequence[Tensor]) -> Tensor:
    """Return dX by one scatter op, with a term for every product that has a gradient."""
    lhs, rhs = [grad for grad, _ in terms], [weight.t() for _, weight in terms]
    if not terms:  # only the gathered tensor was used: an empty sum plus its gradient
        assert gathered_grad is not None
        rows, cols = gathered_grad.shape
        lhs, rhs = [gathered_grad.new_empty((rows, 0))], [gathered_grad.new_empty((0, cols))]
    out, _, _ = OPS.matmul_reduce_scatter(
        lhs,
        rhs,
        gathered_grad,
        ctx.outer,
        ctx.shard_dim_is_last,
        "sum",
        weights[0].dtype,
        False,
        "plain",
        [],
        [],
        ctx.strategy,
        ctx.group,
        ctx.site,
    )
    return out


def _weight_grads(ctx: Any, activation: Tensor | None, products: list[Any]) -> list[Tensor]:
    """Return G^T @ dY for each of `products`."""
    if not products:
        return []
    assert activation is not None
    if ctx.saved == "gathered":
        return [activation.t() @ grad for grad in products]
    site, transpose_gathered, transpose_out = f"{ctx.site}.gather", [True] * len(products), [False] * len(products)
    _, outs = OPS.all_gather_matmul(
        activation,
        products,
        transpose_gathered,
        transpose_out,
        ctx.outer,
        ctx.shard_dim_is_last,
        False,
        [],
        [],
        ctx.strategy,
        ctx.group,
        site,
    )
    return outs

"""What a caller of a plain function brings, checked, and as the ops want it: matrices, and where the shards lie in them.

Legend: R ranks; K in, N out; o = `outer`, the product of the dims before the sharded one.

    all_gather_matmul       shard [.., d, .., K] @ weight [K, N]   -> [.., R * d, .., N]   d: gather_dim, 0 by default
                            shard [.., K / R]    @ weight [K, N]   -> [.., N]              gather_dim the last: K is gathered
    matmul_reduce_scatter   x [.., R * d, .., K] @ weight [K, N]   -> [.., d, .., N]       d: scatter_dim, 0 by default
                            x [.., K]            @ weight [K, R*n] -> [.., n]              scatter_dim the last: N is scattered
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from .. import errors

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Caller(NamedTuple):
    """Who is calling, for errors: the function's name, and the site that ops and statistics know it by."""

    function: str
    site: str

    def refuse(self, what: str, got: object, expected: object, fix: str = "") -> NoReturn:
        where = f"ub_overlap.{self.function} at site '{self.site}'"
        raise errors.OptionError(what, where=where, got=str(got), expected=str(expected), fix=fix)


def caller(function: str, site: str | None) -> Caller:
    """The empty part before the slash: such a site belongs to no compiled plan, so there is no plan to compare."""
    if site is not None and not isinstance(site, str):
        Caller(function, "").refuse("site is not a text", repr(site), "a name, or None")
    return Caller(function, f"/{site or function}")


class Layout(NamedTuple):
    """`outer` and `last` of the ops; `shape`: of the result, without its last dim where that is a weight's N."""

    outer: int
    last: bool
    shape: tuple[int, ...]


def dim_of(who: Caller, name: str, dim: int, x: Tensor) -> int:
    if x.dim() < 2:
        who.refuse("the input has too few dims", list(x.shape), "two dims or more")
    if isinstance(dim, bool) or not isinstance(dim, int) or not -x.dim() <= dim < x.dim():
        who.refuse(f"{name} is not a dim of the input", repr(dim), f"{-x.dim()} to {x.dim() - 1}")
    return dim % x.dim()


def gathered(who: Caller, shard: Tensor, dim: int, ranks: int) -> Layout:
    dim = dim_of(who, "gather_dim", dim, shard)
    if dim == shard.dim() - 1:
        return Layout(1, True, tuple(shard.shape[:-1]))
    shape = list(shard.shape[:-1])
    shape[dim] = shape[dim] * ranks
    return Layout(math.prod(shard.shape[:dim]), False, tuple(shape))


def scattered(who: Caller, x: Tensor, cols: int, dim: int, ranks: int) -> Layout:
    dim = dim_of(who, "scatter_dim", dim, x)
    size = cols if dim == x.dim() - 1 else x.shape[dim]
    if size % ranks:
        who.refuse(f"dim {dim} of the product cannot be scattered evenly", size, f"a multiple of {ranks}, the group's ranks")
    if dim == x.dim() - 1:
        return Layout(1, True, tuple(x.shape[:-1]))
    shape = list(x.shape[:-1])
    shape[dim] = shape[dim] // ranks
    return Layout(math.prod(x.shape[:dim]), False, tuple(shape))


def listed(value: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)


def operands(who: Caller, inner: int, x: Tensor, weights: list[Tensor]) -> None:
    """Every weight is [inner, N], of x's dtype, where x lies."""
    if x.dtype not in DTYPES:
        who.refuse("this dtype is not supported", x.dtype, "float32, bfloat16 or float16")
    if not weights:
        who.refuse("there is no weight", "an empty list", "one weight or more")
    for i, weight in enumerate(weights):
        if weight.dim() != 2 or weight.shape[0] != inner:
            fix = "weights are [in, out]: pass linear.weight.t()" if weight.dim() == 2 and weight.shape[1] == inner else ""
            who.refuse(f"weight {i} does not fit the input", list(weight.shape), f"[{inner}, N]", fix)
        same(who, f"weight {i}", weight, x)


def same(who: Caller, name: str, tensor: Tensor, x: Tensor) -> None:
    if tensor.dtype != x.dtype:
        who.refuse(f"{name} has another dtype than the input", tensor.dtype, x.dtype)
    if tensor.device != x.device:
        who.refuse(f"{name} is on another device than the input", tensor.device, x.device)


def biases(who: Caller, bias: Tensor | Sequence[Tensor | None] | None, weights: list[Tensor]) -> list[Tensor | None]:
    """One [N] or None a weight."""
    given: list[Tensor | None] = [bias] if isinstance(bias, Tensor) else list(bias or [None] * len(weights))
    if len(given) != len(weights):
        who.refuse("biases and weights differ in number", len(given), len(weights))
    for i, (b, w) in enumerate(zip(given, weights, strict=True)):
        if b is not None and tuple(b.shape) != (w.shape[1],):
            who.refuse(f"bias {i} does not fit", list(b.shape), [w.shape[1]])
    return given


def one_of(who: Caller, name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        who.refuse(f"{name} is unknown", repr(value), " or ".join(repr(a) for a in allowed))


def autocast(*tensors: Tensor | None) -> list[Any]:
    """Under torch.autocast, the tensors (None stays None) in its dtype, as torch's own linear takes them."""
    first = next(t for t in tensors if t is not None)
    kind = first.device.type
    if not torch.is_autocast_enabled(kind) or first.dtype == torch.float64:
        return list(tensors)
    dtype = torch.get_autocast_dtype(kind)
    return [t if t is None or not t.is_floating_point() else t.to(dtype) for t in tensors]


def steady(grad: Tensor) -> Tensor:
    """A gradient as a matrix that matmuls take as it is: one that autograd only expanded is written out."""
    rows, cols = grad.stride()
    plain = (cols == 1 and rows >= grad.shape[1]) or (rows == 1 and cols >= grad.shape[0])
    return grad if plain else grad.contiguous()


def differentiable(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)

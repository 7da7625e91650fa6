"""Check the arguments of the functions and turn them into the ops' arguments: matrices, and how shards lie in them.

Legend: R ranks; K in, N out; o = `outer`, the product of the dims before the sharded one.

    all_gather_matmul       shard [.., d, .., K] @ weight [K, N]   -> [.., R * d, .., N]   d: gather_dim, 0 by default
                            shard [.., K / R]    @ weight [K, N]   -> [.., N]              gather_dim the last: K is gathered
    matmul_reduce_scatter   x [.., R * d, .., K] @ weight [K, N]   -> [.., d, .., N]       d: scatter_dim, 0 by default
                            x [.., K]            @ weight [K, R*n] -> [.., n]              scatter_dim the last: N is scattered
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor

from .. import errors

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Tensors = TypeVar("Tensors", Tensor, list[Tensor], Sequence[Tensor])
"""A tensor for a tensor, a list for a list."""


class Caller(NamedTuple):
    """The call, for errors: the function's name, and its site in ops and statistics."""

    function: str
    site: str

    def refuse(self, what: str, got: object, expected: object, fix: str = "") -> NoReturn:
        """Raise OptionError for an argument of this call."""
        where = f"ub_overlap.{self.function} at site '{self.site}'"
        raise errors.OptionError(what, where=where, got=str(got), expected=str(expected), fix=fix)


def caller(function: str, site: str | None) -> Caller:
    """Return the call of `function` at `site`. The empty digest in the site means that there is no plan to compare."""
    if site is not None and not isinstance(site, str):
        Caller(function, "").refuse("site is not a string", repr(site), "a name, or None")
    return Caller(function, f"/{site or function}")


class Layout(NamedTuple):
    """Layout of the shards. `shape`: of the result, without its last dim where that is a weight's N."""

    outer: int
    """Product of the dims before the sharded one."""
    shard_dim_is_last: bool
    shape: tuple[int, ...]


def dim_of(call: Caller, name: str, dim: int, x: Tensor) -> int:
    """Return `dim` of `x` as a non-negative number."""
    if x.dim() < 2:
        call.refuse("the input has too few dims", list(x.shape), "two dims or more")
    if isinstance(dim, bool) or not isinstance(dim, int) or not -x.dim() <= dim < x.dim():
        call.refuse(f"{name} is not a dim of the input", repr(dim), f"{-x.dim()} to {x.dim() - 1}")
    return dim % x.dim()


def gather_layout(call: Caller, shard: Tensor, dim: int, ranks: int) -> Layout:
    """Return the layout of a gather along `dim`."""
    dim = dim_of(call, "gather_dim", dim, shard)
    if dim == shard.dim() - 1:
        return Layout(1, True, tuple(shard.shape[:-1]))
    shape = list(shard.shape[:-1])
    shape[dim] = shape[dim] * ranks
    return Layout(math.prod(shard.shape[:dim]), False, tuple(shape))


def scatter_layout(call: Caller, x: Tensor, cols: int, dim: int, ranks: int) -> Layout:
    """Return the layout of a scatter along `dim` of a product with `cols` columns."""
    dim = dim_of(call, "scatter_dim", dim, x)
    size = cols if dim == x.dim() - 1 else x.shape[dim]
    if size % ranks:
        call.refuse(f"dim {dim} of the product cannot be scattered evenly", size, f"a multiple of {ranks}, the group's ranks")
    if dim == x.dim() - 1:
        return Layout(1, True, tuple(x.shape[:-1]))
    shape = list(x.shape[:-1])
    shape[dim] = shape[dim] // ranks
    return Layout(math.prod(x.shape[:dim]), False, tuple(shape))


def as_list(value: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """Return a tensor, or a sequence of tensors, as a list."""
    return [value] if isinstance(value, Tensor) else list(value)


def check_weights(call: Caller, inner: int, x: Tensor, weights: list[Tensor]) -> None:
    """Check that every weight is [inner, N], with x's dtype and device."""
    if x.dtype not in DTYPES:
        call.refuse("unsupported dtype", x.dtype, "float32, bfloat16 or float16")
    if not weights:
        call.refuse("no weight", "an empty list", "one weight or more")
    for i, weight in enumerate(weights):
        if weight.dim() != 2 or weight.shape[0] != inner:
            fix = "weights are [in, out]: pass linear.weight.t()" if weight.dim() == 2 and weight.shape[1] == inner else ""
            call.refuse(f"weight {i} does not fit the input", list(weight.shape), f"[{inner}, N]", fix)
        check_same(call, f"weight {i}", weight, x)


def check_same(call: Caller, name: str, tensor: Tensor, x: Tensor) -> None:
    """Check that `tensor` has the dtype and the device of `x`."""
    if tensor.dtype != x.dtype:
        call.refuse(f"{name} has another dtype than the input", tensor.dtype, x.dtype)
    if tensor.device != x.device:
        call.refuse(f"{name} is on another device than the input", tensor.device, x.device)


def bias_list(call: Caller, bias: Tensor | Sequence[Tensor | None] | None, weights: list[Tensor]) -> list[Tensor | None]:
    """Return one bias ([N] or None) per weight, checked."""
    biases: list[Tensor | None] = [bias] if isinstance(bias, Tensor) else list(bias or [None] * len(weights))
    if len(biases) != len(weights):
        call.refuse("biases and weights differ in number", len(biases), len(weights))
    for i, (b, w) in enumerate(zip(biases, weights, strict=True)):
        if b is not None and tuple(b.shape) != (w.shape[1],):
            call.refuse(f"bias {i} does not fit", list(b.shape), [w.shape[1]])
    return biases


def check_choice(call: Caller, name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Check that `value` is one of `allowed`."""
    if value not in allowed:
        call.refuse(f"{name} is unknown", repr(value), " or ".join(repr(a) for a in allowed))


def autocast(*tensors: Tensor | None) -> list[Any]:
    """Cast the tensors (None stays None) as torch's own linear does under torch.autocast."""
    first = next(t for t in tensors if t is not None)
    kind = first.device.type
    if not torch.is_autocast_enabled(kind) or first.dtype == torch.float64:
        return list(tensors)
    dtype = torch.get_autocast_dtype(kind)
    return [t if t is None or not t.is_floating_point() else t.to(dtype) for t in tensors]


def as_dense_matrix(grad: Tensor) -> Tensor:
    """Return a gradient in a layout that matmuls accept: an expanded one is made contiguous."""
    rows, cols = grad.stride()
    is_dense = (cols == 1 and rows >= grad.shape[1]) or (rows == 1 and cols >= grad.shape[0])
    return grad if is_dense else grad.contiguous()


def needs_autograd(*tensors: Tensor | None) -> bool:
    """Return whether autograd must record a call with these inputs."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)

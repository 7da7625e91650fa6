"""Inputs of a compiled region whose collective is in flight.

Eager DTensor code and functional collectives return tensors that wait at their first use, as a tensor-parallel embedding does
before blocks that are compiled one by one. AOTAutograd takes such an input apart: it loses the gradient, and reads the local
tensor of a DTensor without a wait. So AOTAutograd compiles for an alias of the input that has landed, and each call gets one:

    input: AsyncCollectiveTensor(elem)            ->   alias of elem, whose gradient goes on to the input
    input: DTensor(AsyncCollectiveTensor(elem))   ->   DTensor(alias of elem), likewise

The input itself is not changed. Dynamo writes its guards after the backend has returned, from the input and its elem; a change
that a compilation made to them would be expected of the next call, and compile it again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ub_overlap import _aot_compat
from ub_overlap import _torch_compat as compat


def find_in_flight(inputs: Sequence[Any]) -> list[int]:
    """Return the positions of inputs whose collective, or that of a tensor in them, may be in flight.

    Dynamo guards on these types, so they are the same in every call of a graph.
    """
    return [i for i, value in enumerate(inputs) if _is_in_flight(value)]


def landed_examples(inputs: Sequence[Any], in_flight: Sequence[int]) -> list[Any]:
    """Return the inputs to compile for: fake aliases, with the symbolic sizes of Dynamo, of those at the given positions."""
    return [_alias(_aot_compat.fake_input(value)) if i in in_flight else value for i, value in enumerate(inputs)]


def with_landed_inputs(compiled: Callable[..., Any], in_flight: Sequence[int]) -> Callable[..., Any]:
    """Return `compiled`, called with aliases of the inputs at the given positions after their collectives have ended."""

    def call(*inputs: Any) -> Any:
        given = list(inputs)
        for i in in_flight:
            given[i] = _alias(inputs[i])
        versions = {i: given[i]._version for i in in_flight if given[i].requires_grad}
        results = compiled(*given)
        for i, version in versions.items():
            if given[i]._version != version:  # Written in place: the memory is shared, the history is not.
                inputs[i].copy_(given[i])
        return results

    return call


def _is_in_flight(value: Any) -> bool:
    if isinstance(value, compat.InFlightTensor):
        return True
    return compat.is_wrapper_subclass(value) and any(map(_is_in_flight, _inner_tensors(value).values()))


def _inner_tensors(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__tensor_flatten__()[0]}


def _alias(value: Tensor) -> Tensor:
    """Return a tensor with the memory of `value`, not in flight, whose gradient is that of `value`, also under no_grad."""
    with torch.enable_grad():
        return _Alias.apply(value)  # type: ignore[no-any-return]


class _Alias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:  # type: ignore[override]
        return _landed(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


def _landed(value: Any) -> Any:
    """Return `value` built again from tensors that have landed. Plain tensors in it are shared."""
    if isinstance(value, compat.InFlightTensor):
        return _landed(value.trigger_wait()).detach()
    if not compat.is_wrapper_subclass(value):
        return value
    _, context = value.__tensor_flatten__()
    inner = {name: _landed(tensor) for name, tensor in _inner_tensors(value).items()}
    return value.__tensor_unflatten__(inner, context, value.size(), value.stride())

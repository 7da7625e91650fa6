"""A function of tokens, computed for two halves of them one behind the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def in_halves(function: Callable[..., Any], tokens: Sequence[Tensor], dim: int) -> Any:
    """Return `function(*tokens)`, computed for two halves along `dim`."""
    size = tokens[0].shape[dim]
    half = size // 2
    first, second = [t.narrow(dim, 0, half) for t in tokens], [t.narrow(dim, half, size - half) for t in tokens]
    return _join(function(*first), function(*second), first[0], dim)


def _join(one: Any, other: Any, tokens: Tensor, dim: int) -> Any:
    """Return the results of both halves as one. `tokens`: the first half, whose results are `one`."""
    if isinstance(one, Tensor):
        if one.dim() == tokens.dim() and one.shape[dim] == tokens.shape[dim]:
            return torch.cat([one, other], dim)
        # Rows of all tokens, as of a router. The dims in front of `dim` have one entry, so they are in order.
        if one.dim() > 0 and one.shape[0] == tokens.numel() // tokens.shape[-1]:
            return torch.cat([one, other])
        raise TypeError(_refusal(f"a tensor of {tuple(one.shape)} for tokens of {tuple(tokens.shape)}"))
    if isinstance(one, tuple | list):
        joined = [_join(a, b, tokens, dim) for a, b in zip(one, other, strict=True)]
        return type(one)(*joined) if hasattr(one, "_fields") else type(one)(joined)
    if isinstance(one, dict):
        results = {name: _join(value, other[name], tokens, dim) for name, value in one.items()}
        return results if type(one) is dict else type(one)(**results)
    if one is None or isinstance(one, bool | str):
        return one
    raise TypeError(_refusal("a number or an object"))


def _refusal(got: str) -> str:
    """Return the text of an error. It is raised as a TypeError: Dynamo traces no exceptions of other packages."""
    return (
        f"a result of a tokenwise layer has no dim of tokens: got {got}; expected the tokens in front, as in the argument or "
        "flat; declare the part of the layer that returns tokens only, or set options={'split_tokens': 'off'}"
    )

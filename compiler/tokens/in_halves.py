"""A function of tokens, computed for two halves of them one behind the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ub_overlap.runtime.errors import UbOverlapError


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
        raise UbOverlapError(
            what="a result of a tokenwise layer has no dim of tokens",
            where="ub_overlap.tokenwise(layer)",
            got=f"a result of shape {tuple(one.shape)} for tokens of shape {tuple(tokens.shape)}",
            expected="the tokens in front, as in the argument or flat",
            fix="declare the part of the layer that returns tokens only, or set options={'split_tokens': 'off'}",
        )
    if isinstance(one, tuple | list):
        joined = [_join(a, b, tokens, dim) for a, b in zip(one, other, strict=True)]
        return tuple(joined) if isinstance(one, tuple) else joined
    if isinstance(one, dict):
        return {name: _join(value, other[name], tokens, dim) for name, value in one.items()}
    return one

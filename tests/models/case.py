"""Result types of a model's `build`: the module of this rank, its inputs and its expected sites."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Sites:
    """Number of collectives of one graph phase, by their relation to a matmul.

    gather: all_gather -> matmul(s); scatter: matmul(s) -> reduce_scatter; reduce: matmul(s) -> all_reduce.
    contracted: gathers that a weight gradient (also) contracts over the gathered dim (included in `gather`).
    merged, merged_scatters: all_reduces and reduce_scatters that are removed because their results are summed.
    merged_gathers: all_gathers that are removed because another one gathers the same tensor.
    plain_*: collectives without an adjacent matmul; they are never candidates of those three kinds.
    """

    gather: int = 0
    scatter: int = 0
    reduce: int = 0
    contracted: int = 0
    merged: int = 0
    merged_scatters: int = 0
    merged_gathers: int = 0
    plain_gather: int = 0
    plain_scatter: int = 0
    plain_reduce: int = 0

    @property
    def all_gathers(self) -> int:
        """Return the number of all_gather nodes in the traced graph."""
        return self.gather + self.merged_gathers + self.plain_gather

    @property
    def reduce_scatters(self) -> int:
        """Return the number of reduce_scatter nodes in the traced graph."""
        return self.scatter + self.merged_scatters + self.plain_scatter

    @property
    def all_reduces(self) -> int:
        """Return the number of all_reduce nodes in the traced graph."""
        return self.reduce + self.merged + self.plain_reduce


@dataclass(frozen=True)
class Expected:
    """Sites of forward and backward as traced. By default, AOTAutograd saves gathered tensors.

    refused, refused_backward: "" if all sites of the phase must be rewritten, else why a plain rewrite would be wrong. Such a
    site may stay a collective with a Reason, or get a correct rewrite. Tests then check numerics, not counts.
    """

    forward: Sites = field(default_factory=Sites)
    backward: Sites = field(default_factory=Sites)
    refused: str = ""
    refused_backward: str = ""


class _Place:
    device = torch.device("cpu")


def device() -> torch.device:
    """Return the device on which cases are built: the CPU, or the device of `on`."""
    return _Place.device


@contextlib.contextmanager
def on(where: torch.device | str) -> Iterator[None]:
    """Build the enclosed cases on this device, with the same values as on the CPU."""
    before, _Place.device = _Place.device, torch.device(where)
    try:
        yield
    finally:
        _Place.device = before


def settle(module: nn.Module, dtype: torch.dtype, exact: bool) -> nn.Module:
    """Cast `module` to dtype; with `exact`, store the rounded weights as float64 for reference runs."""
    return module.to(dtype).to(device(), torch.float64 if exact else dtype)


def noise(shape: tuple[int, ...], seed: int, dtype: torch.dtype, exact: bool, grad: bool = True) -> Tensor:
    """Return normally distributed values that are equal for all dtypes up to rounding."""
    value = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return value.to(device(), torch.float64 if exact else dtype).requires_grad_(grad)


@dataclass(frozen=True)
class Case:
    """A module of this rank and its inputs, run as `module(*inputs)`.

    Two cases from `build` have the same seed and weights.
    dynamic: for torch.compile. context: entered around forward and backward.
    """

    module: nn.Module
    inputs: tuple[Any, ...]
    expected: Expected
    dynamic: bool | None = None
    context: Callable[[], AbstractContextManager[Any]] | None = None

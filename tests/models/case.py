"""What a model's `build` returns: the module of this rank, its inputs and what its structure says about sites."""

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
    """Collectives of one graph phase by what they are to a matmul.

    gather: all_gather -> matmul(s); scatter: matmul(s) -> reduce_scatter; reduce: matmul(s) -> all_reduce.
    contracted: gathers whose tensor is (also) contracted over the gathered dim, by a weight gradient (part of `gather`).
    merged: all_reduces that disappear because their results are summed.
    plain_*: collectives next to no matmul: never candidates of those three kinds.
    """

    gather: int = 0
    scatter: int = 0
    reduce: int = 0
    contracted: int = 0
    merged: int = 0
    plain_gather: int = 0
    plain_scatter: int = 0
    plain_reduce: int = 0

    @property
    def all_gathers(self) -> int:
        """all_gather nodes that the traced graph holds."""
        return self.gather + self.plain_gather

    @property
    def reduce_scatters(self) -> int:
        """reduce_scatter nodes that the traced graph holds."""
        return self.scatter + self.plain_scatter

    @property
    def all_reduces(self) -> int:
        """all_reduce nodes that the traced graph holds."""
        return self.reduce + self.merged + self.plain_reduce


@dataclass(frozen=True)
class Expected:
    """Sites of forward and backward as traced, with what AOTAutograd saves by default (gathered tensors).

    refused, refused_backward: "" when all sites of the phase must be rewritten; else what makes them other than they look. Such
    a site may stay a collective, with a Reason, or be rewritten rightly: numbers decide, counts do not.
    """

    forward: Sites = field(default_factory=Sites)
    backward: Sites = field(default_factory=Sites)
    refused: str = ""
    refused_backward: str = ""


class _Place:
    device = torch.device("cpu")


def device() -> torch.device:
    """Where cases are built: the CPU, or what `on` says."""
    return _Place.device


@contextlib.contextmanager
def on(where: torch.device | str) -> Iterator[None]:
    """Cases built inside live on this device, with the values that they have on the CPU."""
    before, _Place.device = _Place.device, torch.device(where)
    try:
        yield
    finally:
        _Place.device = before


def settle(module: nn.Module, dtype: torch.dtype, exact: bool) -> nn.Module:
    """`module` with weights in dtype; exact: the same rounded values as float64, for reference runs."""
    return module.to(dtype).to(device(), torch.float64 if exact else dtype)


def noise(shape: tuple[int, ...], seed: int, dtype: torch.dtype, exact: bool, grad: bool = True) -> Tensor:
    """Normal values, the same for each dtype up to its rounding."""
    value = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return value.to(device(), torch.float64 if exact else dtype).requires_grad_(grad)


@dataclass(frozen=True)
class Case:
    """`module(*inputs)` on this rank. Fresh from `build`: same seed, same weights.

    dynamic: for torch.compile. context: entered around forward and backward.
    """

    module: nn.Module
    inputs: tuple[Any, ...]
    expected: Expected
    dynamic: bool | None = None
    context: Callable[[], AbstractContextManager[Any]] | None = None

"""Inputs of a compiled region whose collective is in flight.

Eager DTensor and functional collectives return tensors that wait at their first use, as an embedding does in front of blocks
that are compiled one by one. AOTAutograd takes such an input apart, and its gradient is lost without an error (torch 2.13).
So it is waited for in front of the region.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ub_overlap import _torch_compat as compat

from .aten import c10d


def has_in_flight_inputs(inputs: Sequence[Any]) -> bool:
    """Return whether the collective of one of `inputs` may be in flight."""
    return any(isinstance(value, compat.InFlightTensor) for value in inputs)


def wait_for_inputs(inputs: Sequence[Any]) -> list[Any]:
    """Return `inputs` with plain tensors in place of those in flight. Gradients reach these."""
    return [c10d.wait_tensor.default(value) if isinstance(value, compat.InFlightTensor) else value for value in inputs]

"""A cast to float8 by an amax that is known beforehand; it also measures the amax of its input."""

from __future__ import annotations

import torch
from torch import Tensor

from ..numerics import LEAST_SCALE

HEADROOM = 2.0
"""Factor by which a tensor may grow over its history before it saturates. It costs one binade of 18 (e4m3) or 32 (e5m2), and
no bit."""


def cast(x: Tensor, amax: Tensor, index: int, amax_out: Tensor, format: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cast x by amax[index]; return (float8 of x's shape, contiguous; its scale []).

    amax_out [1] becomes the maximum of itself and the finite absolute values of x."""
    if x.is_cuda and hasattr(torch.ops.ub_overlap, "fp8_delayed_cast"):  # csrc/cuda/fp8_delayed_cast.cu: one pass over x
        return torch.ops.ub_overlap.fp8_delayed_cast.default(x, amax, index, amax_out, format, HEADROOM)
    return cast_in_aten(x, amax, index, amax_out, format)


def cast_in_aten(x: Tensor, amax: Tensor, index: int, amax_out: Tensor, format: torch.dtype) -> tuple[Tensor, Tensor]:
    """Compute `cast` with ATen ops."""
    format_max = torch.finfo(format).max
    wide = x.float().contiguous()
    finite, current = wide.isfinite(), finite_amax(wide)
    amax_out.copy_(torch.maximum(amax_out, current))
    past = amax[index]
    scale = (torch.where(past > 0, past * HEADROOM, current) * (1.0 / format_max)).clamp_min(LEAST_SCALE)
    clamped = (wide * scale.reciprocal()).clamp(-format_max, format_max)
    return torch.where(finite, clamped, torch.nan).to(format), scale


def finite_amax(wide: Tensor) -> Tensor:
    """Return the largest finite absolute value, float32 []; 0 if there is none."""
    return torch.where(wide.isfinite(), wide.abs(), 0.0).amax() if wide.numel() else wide.new_zeros(())

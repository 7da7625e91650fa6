"""A cast to float8 by a magnitude that is known, which measures what it casts."""

from __future__ import annotations

import torch
from torch import Tensor

from ..numerics import LEAST_SCALE

HEADROOM = 2.0
"""By how much a tensor may grow over its history before it saturates: a binade of 18 (e4m3) or 32 (e5m2), and no bit."""


def cast(x: Tensor, most: Tensor, at: int, noted: Tensor, format: torch.dtype) -> tuple[Tensor, Tensor]:
    """(float8 of x's shape, contiguous; its scale []), by most[at]; noted [1] becomes the largest of itself and of what is
    finite in x."""
    if x.is_cuda and hasattr(torch.ops.ub_overlap, "fp8_cast"):  # csrc/cuda/quantise.cu: one pass over x
        return torch.ops.ub_overlap.fp8_cast.default(x, most, at, noted, format, HEADROOM)
    return cast_plainly(x, most, at, noted, format)


def cast_plainly(x: Tensor, most: Tensor, at: int, noted: Tensor, format: torch.dtype) -> tuple[Tensor, Tensor]:
    """The same in ATen."""
    top = torch.finfo(format).max
    wide = x.float().contiguous()
    finite, seen = wide.isfinite(), largest(wide)
    noted.copy_(torch.maximum(noted, seen))
    known = most[at]
    scale = (torch.where(known > 0, known * HEADROOM, seen) * (1.0 / top)).clamp_min(LEAST_SCALE)
    bounded = (wide * scale.reciprocal()).clamp(-top, top)
    return torch.where(finite, bounded, torch.nan).to(format), scale


def largest(wide: Tensor) -> Tensor:
    """float32 []: of the finite magnitudes."""
    return torch.where(wide.isfinite(), wide.abs(), 0.0).amax() if wide.numel() else wide.new_zeros(())

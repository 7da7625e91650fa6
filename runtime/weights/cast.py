"""Casting a weight to float8 where it is not what it was.

Legend: R rows and C columns of a weight. `axis`: None for one scale [], -1 for one a row [R, 1], -2 for one a column [1, C].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..float8 import TINY

FORMAT = torch.float8_e4m3fn


@dataclass(slots=True, eq=False)
class Cast:
    """`q` [R, C] and `scale`, with what tells whether they are up to date: on GPUs a word that the bits are summed up to (0: of
    nothing yet), elsewhere a copy of the bits."""

    q: Tensor
    scale: Tensor
    known: Tensor
    scratch: Tensor
    was: Tensor | None = None
    stream: torch.cuda.Stream | None = None
    """Where it was last used."""


def made(weight: Tensor, axis: int | None) -> Cast:
    """Memory for the cast of `weight`, on the current stream."""
    rows, cols = weight.shape
    shape = () if axis is None else (rows, 1) if axis == -1 else (1, cols)
    # e4m3 zeros: what is never cast is no garbage
    q = torch.zeros((rows, cols), dtype=torch.uint8, device=weight.device).view(FORMAT)
    scale = torch.zeros(shape, dtype=torch.float32, device=weight.device)
    return Cast(q, scale, torch.zeros(1, dtype=torch.int64, device=weight.device), _scratch(scale))


def _scratch(scale: Tensor) -> Tensor:
    """What weights.cu counts in: zeros before and after."""
    return torch.zeros(2 + (scale.numel() + 1) // 2, dtype=torch.int64, device=scale.device)


def by_kernel(weight: Tensor) -> bool:
    return weight.is_cuda and hasattr(torch.ops.ub_overlap, "fp8_weight_refresh")


def refresh(weight: Tensor, through: torch.dtype, axis: int | None, cast: Cast, captured: bool) -> None:
    """Casts `weight`, rounded to `through` first, into `cast` where that is of other bits. `captured`: into a CUDA graph, which
    gets scratch of its own."""
    if by_kernel(weight):
        scratch = _scratch(cast.scale) if captured else cast.scratch
        torch.ops.ub_overlap.fp8_weight_refresh.default(weight, through, axis, cast.q, cast.scale, cast.known, scratch)
    else:
        refresh_plainly(weight, through, axis, cast)


def refresh_plainly(weight: Tensor, through: torch.dtype, axis: int | None, cast: Cast) -> None:
    """The same in ATen; on GPUs it casts every time, as the host would have to wait for the answer."""
    now = weight.to(through)
    bits = now.view(torch.int16)
    if cast.was is not None and torch.equal(cast.was, bits):
        return
    if not weight.is_cuda:
        cast.was = bits.clone()
    q, scale = cast_plainly(now, axis)
    cast.q.view(torch.uint8).copy_(q.view(torch.uint8))
    cast.scale.copy_(scale)


def cast_plainly(weight: Tensor, axis: int | None) -> tuple[Tensor, Tensor]:
    """(float8 of `weight`, its scale), as compiler/fp8/quantise.py spells them."""
    top = torch.finfo(FORMAT).max
    size = weight.abs()
    most = (size.amax() if axis is None else size.amax(axis, keepdim=True)).float()
    scale = (most * (1.0 / top)).clamp_min(TINY)
    return (weight.float() * scale.reciprocal()).clamp_min(-top).clamp_max(top).to(FORMAT), scale

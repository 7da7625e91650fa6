"""Casting a weight to float8 where it is not what it was.

Legend: R rows and C columns of a weight. `axis`: None for one scale [], -1 for one a row [R, 1], -2 for one a column [1, C].
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..numerics import LEAST_SCALE

FORMAT = torch.float8_e4m3fn


@dataclass(slots=True, eq=False)
class CachedCast:
    """`q` [R, C] and `scale`, with what tells whether they are up to date: on GPUs `known` [1], what the bits are summed up to
    (0: nothing yet), elsewhere `was`, a copy of the bits."""

    q: Tensor
    scale: Tensor
    known: Tensor
    scratch: Tensor
    was: Tensor | None = None
    looks: int = 0
    """Of forwards since backward used it."""
    lock: threading.Lock = field(default_factory=threading.Lock)


def shape_of_scale(weight: Tensor, axis: int | None) -> tuple[int, ...]:
    rows, cols = weight.shape
    return () if axis is None else (rows, 1) if axis == -1 else (1, cols)


def made(weight: Tensor, axis: int | None) -> CachedCast:
    """Memory for the cast of `weight`, on the current stream."""
    # e4m3 zeros: what is never cast is no garbage
    q = torch.zeros(weight.shape, dtype=torch.uint8, device=weight.device).view(FORMAT)
    scale = torch.zeros(shape_of_scale(weight, axis), dtype=torch.float32, device=weight.device)
    return CachedCast(q, scale, torch.zeros(1, dtype=torch.int64, device=weight.device), _scratch(scale))


def _scratch(scale: Tensor) -> Tensor:
    """What weights.cu counts in: zeros before and after."""
    return torch.zeros(3 + (scale.numel() + 1) // 2, dtype=torch.int64, device=scale.device)


def by_kernel(weight: Tensor) -> bool:
    return weight.is_cuda and hasattr(torch.ops.ub_overlap, "fp8_weight_refresh")


def refresh(weight: Tensor, through: torch.dtype, axis: int | None, cast: CachedCast) -> None:
    """Casts `weight`, rounded to `through` first, into `cast` where that is of other bits."""
    if by_kernel(weight):
        memory = cast.q, cast.scale, cast.known, cast.scratch
        torch.ops.ub_overlap.fp8_weight_refresh.default(weight, through, axis, *memory)
    else:
        refresh_plainly(weight, through, axis, cast)


def refresh_plainly(weight: Tensor, through: torch.dtype, axis: int | None, cast: CachedCast) -> None:
    """The same in ATen; on GPUs it casts every time, as the host would have to wait for the answer."""
    now = weight.to(through)
    bits = now.view(torch.int16)
    if cast.was is not None and torch.equal(cast.was, bits):
        return
    cast.was = None  # whatever ends this early leaves nothing that is taken for up to date
    q, scale = cast_plainly(now, axis)
    cast.q.view(torch.uint8).copy_(q.view(torch.uint8))
    cast.scale.copy_(scale)
    if not weight.is_cuda:
        cast.was = bits.clone()


def cast_plainly(weight: Tensor, axis: int | None) -> tuple[Tensor, Tensor]:
    """(float8 of `weight`, its scale), as compiler/fp8/cast_nodes.py spells them."""
    top = torch.finfo(FORMAT).max
    size = weight.abs()
    most = (size.amax() if axis is None else size.amax(axis, keepdim=True)).float()
    scale = (most * (1.0 / top)).clamp_min(LEAST_SCALE)
    return (weight.float() * scale.reciprocal()).clamp_min(-top).clamp_max(top).to(FORMAT), scale

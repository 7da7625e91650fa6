"""Cast a weight to float8 if its elements have changed since the cached cast.

Legend: R rows and C columns of a weight. `axis`: None for one scale [], -1 for a scale per row [R, 1], -2 for a scale per
column [1, C].
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ...extension import extension
from ..numerics import E4M3, LEAST_SCALE

FORMAT = E4M3


def _new_forward_uses() -> Any:
    return extension().ForwardUses()


@dataclass(slots=True, eq=False)
class CachedWeight:
    """The cast of one weight, `q` [R, C] and `scale`, and a record of the bits that it was computed from.

    On GPUs the record is `checksum` int64 [2] over the weight's bits, of `q` and of `transposed`, 0 before the first cast. On
    other devices it is `cast_bits`, a copy of the bits. The C++ struct of this name has the same fields
    (csrc/bindings/ops/fp8_cached_weight.cpp).
    """

    q: Tensor
    scale: Tensor
    checksum: Tensor
    scratch: Tensor
    cast_bits: Tensor | None = None
    transposed: Tensor | None = None
    """A contiguous copy [C, R] of `q`, once one was asked for. C++ holds those of CUDA."""
    forward_uses: Any = field(default_factory=_new_forward_uses)
    """Uses by forwards since backward last used the cast, and the rule that they decide (csrc/core/forward_uses.h)."""
    lock: threading.Lock = field(default_factory=threading.Lock)


def scale_shape(shape: Sequence[int], axis: int | None) -> tuple[int, ...]:
    """Return the shape of the scale of a weight of this shape."""
    rows, cols = shape
    return () if axis is None else (rows, 1) if axis == -1 else (1, cols)


def allocate(weights: Sequence[Tensor], axis: int | None) -> list[CachedWeight]:
    """Allocate memory for the casts of `weights`, on the current stream: next to each other, and so are their scales.

    Several weights have one number of columns, and axis -1.
    """
    first, ends = weights[0], list(accumulate(weight.shape[0] for weight in weights))
    shape = (ends[-1], first.shape[1])
    # e4m3 zeros: a cast that never ran leaves no garbage
    q = torch.zeros(shape, dtype=torch.uint8, device=first.device).view(FORMAT)
    scale = torch.zeros(scale_shape(shape, axis), dtype=torch.float32, device=first.device)
    if len(weights) == 1:
        parts = [(q, scale)]
    else:
        parts = [(q[end - w.shape[0] : end], scale[end - w.shape[0] : end]) for w, end in zip(weights, ends, strict=True)]
    checksums = torch.zeros(len(weights), 2, dtype=torch.int64, device=first.device)
    return [CachedWeight(*part, checksum, _scratch(part[1])) for part, checksum in zip(parts, checksums, strict=True)]


def _scratch(scale: Tensor) -> Tensor:
    """Return the kernels' counters, zeros before and after a call. The size is cached_weight_scratch_words() of C++."""
    return torch.zeros(3 + (scale.numel() + 1) // 2, dtype=torch.int64, device=scale.device)


def has_kernel(weight: Tensor) -> bool:
    """Return whether our kernels cast `weight`: on CUDA, in a build with CUDA."""
    return weight.is_cuda and hasattr(torch.ops.ub_overlap, "fp8_cached_weight_refresh")


def refresh(weight: Tensor, round_to: torch.dtype, axis: int | None, cached: CachedWeight) -> None:
    """Round `weight` to `round_to` and cast it into `cached`, if its bits have changed."""
    if has_kernel(weight):
        memory = cached.q, cached.scale, cached.checksum, cached.scratch
        torch.ops.ub_overlap.fp8_cached_weight_refresh.default(weight, round_to, axis, *memory)
    else:
        refresh_in_aten(weight, round_to, axis, cached)


def refresh_in_aten(weight: Tensor, round_to: torch.dtype, axis: int | None, cached: CachedWeight) -> None:
    """Compute `refresh` with ATen ops. On GPUs it always casts, as the host would have to wait for the comparison."""
    rounded = weight.to(round_to)
    bits = rounded.view(torch.int16)
    if cached.cast_bits is not None and torch.equal(cached.cast_bits, bits):
        return
    cached.cast_bits = None  # an error below must not leave a cast that counts as up to date
    q, scale = cast_in_aten(rounded, axis)
    cached.q.view(torch.uint8).copy_(q.view(torch.uint8))
    cached.scale.copy_(scale)
    if cached.transposed is not None:
        cached.transposed.view(torch.uint8).copy_(q.view(torch.uint8).t())
    if not weight.is_cuda:
        cached.cast_bits = bits.clone()


def transpose(q: Tensor) -> Tensor:
    """Return a contiguous transposed copy of `q`, float8 [R, C]."""
    return q.view(torch.uint8).t().contiguous().view(q.dtype)


def cast_in_aten(weight: Tensor, axis: int | None) -> tuple[Tensor, Tensor]:
    """Return (float8 of `weight`, its scale), computed like the nodes of compiler/fp8/cast_nodes.py."""
    format_max = torch.finfo(FORMAT).max
    size = weight.abs()
    amax = (size.amax() if axis is None else size.amax(axis, keepdim=True)).float()
    scale = (amax * (1.0 / format_max)).clamp_min(LEAST_SCALE)
    return (weight.float() * scale.reciprocal()).clamp_min(-format_max).clamp_max(format_max).to(FORMAT), scale

"""Advance amax histories by a step, and record the amax of a cast. On GPUs by kernels (csrc/cuda/fp8_amax_history.cu).

N tensors, H = LENGTH calls. `current` float32 [CAPACITY], `past` float32 [H, CAPACITY]: as in AmaxHistory. `slots`
int64 [N]: distinct columns of them.
"""

from __future__ import annotations

import torch
from torch import Tensor


def advance(current: Tensor, past: Tensor, slots: Tensor, is_step: bool) -> Tensor:
    """Return the maxima of the histories in `slots`, float32 [N].

    `is_step`: push `current` first and clear it. A tensor that has recorded nothing keeps its history."""
    if current.is_cuda and hasattr(torch.ops.ub_overlap, "fp8_advance_histories"):
        return torch.ops.ub_overlap.fp8_advance_histories.default(current, past, slots, is_step)
    return advance_in_aten(current, past, slots, is_step)


def record(current: Tensor, slots: Tensor, index: int, quantized: Tensor | None, scale: Tensor, sample: Tensor) -> Tensor:
    """Raise `current` in slots[index] to `sample` [] and to the amax of a cast: float8 `quantized`, `scale` [].

    Elements of `quantized` that are not finite do not count. Return a copy of `scale`."""
    if current.is_cuda and hasattr(torch.ops.ub_overlap, "fp8_raise_amax"):
        return torch.ops.ub_overlap.fp8_raise_amax.default(current, slots, index, quantized, scale, sample)
    return record_in_aten(current, slots, index, quantized, scale, sample)


def advance_in_aten(current: Tensor, past: Tensor, slots: Tensor, is_step: bool) -> Tensor:
    """Compute `advance` with ATen ops."""
    rows = past.index_select(1, slots)
    if is_step:
        newest = current.index_select(0, slots)
        current.index_fill_(0, slots, 0.0)
        rows = torch.where(newest > 0, torch.cat([newest[None], rows[:-1]]), rows)
        past.index_copy_(1, slots, rows)
    return rows.amax(0)


def record_in_aten(
    current: Tensor, slots: Tensor, index: int, quantized: Tensor | None, scale: Tensor, sample: Tensor
) -> Tensor:
    """Compute `record` with ATen ops."""
    slot, amax = slots[index : index + 1], sample
    if quantized is not None and quantized.numel() > 0:
        values = quantized.float().abs()
        amax = torch.maximum(amax, torch.where(values.isfinite(), values, 0.0).amax() * scale)
    current.index_copy_(0, slot, torch.maximum(current.index_select(0, slot), amax.reshape(1)))
    return scale.clone()

"""fp8_record_amax: record the amax of a tensor that was cast to float8 in its history.

    fp8_record_amax(Tensor scale, Tensor? quantized, Tensor sample, Tensor slots, int index, str key, str record_in) -> Tensor

scale: float32 [], of the cast. The result is a copy of it. Matmuls read the copy, so no pass removes the op.
quantized: the cast, float8 of any shape. sample: float32 [], the amax of some rows before the cast; of all rows where
`quantized` is None. The larger of both is recorded: a cast that saturates or underflows hides how large its input is, and
the sample shows it. slots: int64 [N], those of the graph's tensors; slots[index] is recorded.
`key`: "<state>;<key>". `record_in`: "forward" or "backward", the half of the graph that casts.

A history keeps the maximum of what is recorded in a step, so recording a call again changes nothing. A forward that a
checkpoint recomputes in backward records nothing.

C++ implements it (csrc/bindings/ops/fp8_amax_history.cpp).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .definition import LIBRARY

SCHEMA = (
    "fp8_record_amax(Tensor scale, Tensor? quantized, Tensor sample, Tensor slots, int index, str key, str record_in) -> Tensor"
)
LIBRARY.define(SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))


@torch.library.register_fake("ub_overlap::fp8_record_amax", lib=LIBRARY)
def fake(
    scale: Tensor, quantized: Tensor | None, sample: Tensor, slots: Tensor, index: int, key: str, record_in: str
) -> Tensor:
    """Return an empty result of the right size."""
    return torch.empty_like(scale)

"""fp8_record_amax: record the amax of a tensor that was cast to float8 in its history.

    fp8_record_amax(Tensor scale, Tensor? quantized, Tensor sample, Tensor slots, int index, str key, str record_in) -> Tensor

scale: float32 [], of the cast. The result is a copy of it. Matmuls read the copy, so no pass removes the op.
quantized: the cast, float8 of any shape. sample: float32 [], the amax of some rows before the cast; of all rows where
`quantized` is None. The larger of both is recorded: a cast that saturates or underflows hides how large its input is, and
the sample shows it. slots: int64 [N], those of the graph's tensors; slots[index] is recorded.
`key`: "<state>;<key>". `record_in`: "forward" or "backward", the half of the graph that casts.

A history keeps the maximum of what is recorded in a step, so recording a call again changes nothing. A forward that a
checkpoint recomputes in backward records nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..fp8.amax_history.history import split_keys
from ..fp8.amax_history.history_update import record
from .definition import define_python_op

SCHEMA = (
    "fp8_record_amax(Tensor scale, Tensor? quantized, Tensor sample, Tensor slots, int index, str key, str record_in) -> Tensor"
)


def fp8_record_amax(
    scale: Tensor, quantized: Tensor | None, sample: Tensor, slots: Tensor, index: int, key: str, record_in: str
) -> Tensor:
    """Record the amax of the cast and return a copy of `scale`."""
    state, name = split_keys(key)
    history = state.history_of(name, scale.device)
    if record_in == "forward" and name in history.recomputing:
        return scale.clone()
    return record(history.current, slots, index, quantized, scale, sample)


def _fake(
    scale: Tensor, quantized: Tensor | None, sample: Tensor, slots: Tensor, index: int, key: str, record_in: str
) -> Tensor:
    return torch.empty_like(scale)


define_python_op(SCHEMA, fp8_record_amax, _fake)

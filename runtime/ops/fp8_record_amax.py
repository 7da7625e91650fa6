"""fp8_record_amax: record the amax of tensors that were cast to float8 in their histories.

    fp8_record_amax(Tensor scale, Tensor slots, Tensor amax, str keys, str record_in) -> Tensor

scale: float32 [], the scale of one of the tensors. The result is a copy of it. Matmuls read the copy, so no pass removes
the op. slots: int64 [N] and amax: float32 [N], of N tensors: the slots of their histories, and their amax in this call.
`keys`: "<state>;<key>;<key>..", N of them. `record_in`: "forward" or "backward", the half of the graph that casts them.

A history keeps the maximum of what is recorded in a step, so recording a call again changes nothing. A forward that a
checkpoint recomputes in backward records nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..fp8.amax_history.history import SEPARATOR, split_keys
from ..fp8.amax_history.history_update import record
from .definition import define_python_op

SCHEMA = "fp8_record_amax(Tensor scale, Tensor slots, Tensor amax, str keys, str record_in) -> Tensor"


def fp8_record_amax(scale: Tensor, slots: Tensor, amax: Tensor, keys: str, record_in: str) -> Tensor:
    """Record `amax` and return a copy of `scale`."""
    state, text = split_keys(keys)
    first = text.partition(SEPARATOR)[0]
    history = state.history_of(first, amax.device)
    if record_in == "forward" and first in history.recomputing:
        return scale.clone()
    return record(history.current, slots, amax, scale)


def _fake(scale: Tensor, slots: Tensor, amax: Tensor, keys: str, record_in: str) -> Tensor:
    return torch.empty_like(scale)


define_python_op(SCHEMA, fp8_record_amax, _fake)

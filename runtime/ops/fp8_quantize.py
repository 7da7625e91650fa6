"""fp8_quantize: cast a tensor to float8 by its amax history, and record its own amax.

    fp8_quantize(Tensor x, Tensor amax, Tensor slots, int index, str key, ScalarType format, str record_in, str groups)
        -> (Tensor q, Tensor scale)

x: any shape, in 16 bits. amax, slots [N]: what fp8_amax_history returned; x uses amax[index] and slots[index].
q: float8 of x's shape, contiguous. scale: float32 [], 2 amax / F with F the format's largest value. While amax is 0, the
scale comes from x's own amax, or from the amax of all ranks of `groups`.
`key`: "<state>;<key>". `record_in`: "forward" or "backward" where the cast belongs to a step, else "never".
`groups`: names joined by ";" of groups whose ranks need one scale; `amax` is equal on those ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..fp8.amax_history.delayed_cast import cast
from ..fp8.amax_history.first_amax import fill_empty_amax
from ..fp8.amax_history.history import split_keys
from .definition import define_python_op

SCHEMA = (
    "fp8_quantize(Tensor x, Tensor amax, Tensor slots, int index, str key, ScalarType format, str record_in, str groups)"
    " -> (Tensor q, Tensor scale)"
)


def fp8_quantize(
    x: Tensor, amax: Tensor, slots: Tensor, index: int, key: str, format: torch.dtype, record_in: str, groups: str
) -> tuple[Tensor, Tensor]:
    """Return (q, scale)."""
    state, name = split_keys(key)
    history = state.history_of(name, x.device)
    # The host knows the slot if there is one module. For several, the device reads it from `slots`, without a wait.
    fixed = slice(history.slots[name], history.slots[name] + 1) if history.module_counts[name] == 1 else None
    slot = slots[index : index + 1]
    if groups:
        amax = fill_empty_amax(history, x, amax[index : index + 1], slot, fixed, name, record_in, groups)
        index = 0
    records = record_in == "backward" or (record_in == "forward" and name not in history.recomputing)
    amax_out = history.current[fixed] if records and fixed is not None else history.current.new_zeros(1)
    quantized = cast(x, amax, index, amax_out, format)
    if records and fixed is None:
        history.current.scatter_reduce_(0, slot, amax_out, "amax")
    return quantized


def _fake(
    x: Tensor, amax: Tensor, slots: Tensor, index: int, key: str, format: torch.dtype, record_in: str, groups: str
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=format), x.new_empty((), dtype=torch.float32)


define_python_op(SCHEMA, fp8_quantize, _fake)

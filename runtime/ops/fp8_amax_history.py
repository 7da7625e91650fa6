"""fp8_amax_history: read the amax histories of a graph's tensors, and advance them by a step.

    fp8_amax_history(Tensor weight, str keys, bool step) -> (Tensor amax, Tensor slots)

`weight` tells apart the modules that share a graph; its elements are not read. `keys`: "<state>;<key>;<key>..", N of them.
amax: float32 [N], the maximum of each history, 0 if it is empty. slots: int64 [N], where the histories lie.
`step`: first push the amax recorded since the last step, except in a forward that a checkpoint recomputes.

C++ implements it (csrc/bindings/ops/fp8_amax_history.cpp). It calls fp8_amax_history_miss for a weight that it does not know.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..fp8.amax_history.history import SEPARATOR, split_keys
from .definition import LIBRARY, define_python_op

SCHEMA = "fp8_amax_history(Tensor weight, str keys, bool step) -> (Tensor amax, Tensor slots)"
LIBRARY.define(SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))


@torch.library.register_fake("ub_overlap::fp8_amax_history", lib=LIBRARY)
def fake(weight: Tensor, keys: str, step: bool) -> tuple[Tensor, Tensor]:
    """Return empty results of the right sizes."""
    n = keys.count(SEPARATOR)
    return weight.new_empty((n,), dtype=torch.float32), weight.new_empty((n,), dtype=torch.int64)


def fp8_amax_history_miss(weight: Tensor, keys: str) -> int:
    """Return the module number of `weight`. C++ then knows the module, except that of a copy made for a capture."""
    state, names = split_keys(keys)
    return state.register(names, weight)


define_python_op("fp8_amax_history_miss(Tensor weight, str keys) -> int", fp8_amax_history_miss, None)

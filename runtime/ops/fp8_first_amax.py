"""fp8_first_amax: return an amax on which ranks agree, for gathered tensors without an amax history.

    fp8_first_amax(Tensor current, Tensor slots, int index, str key, str record_in, str groups) -> Tensor

current: float32 [], the amax of this rank's shard. slots [N]: those of fp8_amax_history; the shard's slot is slots[index].
Result: float32 [], above 0 and equal on all ranks of `groups`, names joined by ";".
`key`: "<state>;<key>". `record_in`: "forward" or "backward" where the cast belongs to a step, else "never".

The ranks agree in the first call of a key, and in every call whose key never records, by all_reduces. The number of calls
decides, which is equal on all ranks. Other calls return the amax of the last agreement: `NEUTRAL_AMAX` before one, and after
one in which all elements were 0.

C++ implements it (csrc/bindings/ops/fp8_amax_history.cpp). It calls fp8_first_amax_miss where the ranks may have to agree.
"""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor

from ub_overlap import _torch_compat as compat

from ..fp8.amax_history.history import NEUTRAL_AMAX, SEPARATOR, is_capturing, split_keys
from .definition import LIBRARY, define_python_op

_ARGUMENTS = "(Tensor current, Tensor slots, int index, str key, str record_in, str groups)"
SCHEMA = f"fp8_first_amax{_ARGUMENTS} -> Tensor"
LIBRARY.define(SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))


@torch.library.register_fake("ub_overlap::fp8_first_amax", lib=LIBRARY)
def fake(current: Tensor, slots: Tensor, index: int, key: str, record_in: str, groups: str) -> Tensor:
    """Return an empty result of the right size."""
    return torch.empty_like(current)


def fp8_first_amax_miss(current: Tensor, slots: Tensor, index: int, key: str, record_in: str, groups: str) -> Tensor:
    """Return the agreed amax [], and tell C++ once the ranks have agreed for all weights that have arrived."""
    state, name = split_keys(key)
    history = state.history_of(name, current.device)
    members = [compat.group_of(group) for group in groups.split(SEPARATOR)]
    agreements, slot = history.agreements.setdefault(members[0], Counter()), slots[index : index + 1]
    if agreements[f"{name};{groups}"] >= history.arrivals[name]:
        torch.ops.ub_overlap.fp8_first_amax_agreed.default(current, key, groups)
    elif not is_capturing(current.device):
        agreed = current.reshape(1).clone()
        for group in members:
            dist.all_reduce(agreed, dist.ReduceOp.MAX, group)
        agreed = torch.where(agreed > 0, agreed, NEUTRAL_AMAX)
        history.agreed_amax.index_copy_(0, slot, agreed)
        agreements[f"{name};{groups}"] += record_in != "never"
        return agreed.reshape(())
    return history.agreed_amax.index_select(0, slot).reshape(())


define_python_op(f"fp8_first_amax_miss{_ARGUMENTS} -> Tensor", fp8_first_amax_miss, None)

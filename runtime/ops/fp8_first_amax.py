"""fp8_first_amax: return an amax on which ranks agree, for gathered tensors without an amax history.

    fp8_first_amax(Tensor current, Tensor slots, int index, str key, str record_in, str groups) -> Tensor

current: float32 [], the amax of this rank's shard. slots [N]: those of fp8_amax_history; the shard's slot is slots[index].
Result: float32 [], above 0 and equal on all ranks of `groups`, names joined by ";".
`key`: "<state>;<key>". `record_in`: "forward" or "backward" where the cast belongs to a step, else "never".

The ranks agree in the first call of a key, and in every call whose key never records, by all_reduces. The number of calls
decides, which is equal on all ranks. Other calls return the amax of the last agreement: `NEUTRAL_AMAX` before one, and after
one in which all elements were 0.
"""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor

from ub_overlap import _torch_compat as compat

from ..fp8.amax_history.history import NEUTRAL_AMAX, SEPARATOR, is_capturing, split_keys
from .definition import define_python_op

SCHEMA = "fp8_first_amax(Tensor current, Tensor slots, int index, str key, str record_in, str groups) -> Tensor"


def fp8_first_amax(current: Tensor, slots: Tensor, index: int, key: str, record_in: str, groups: str) -> Tensor:
    """Return the agreed amax []."""
    state, name = split_keys(key)
    history = state.history_of(name, current.device)
    members = [compat.group_of(group) for group in groups.split(SEPARATOR)]
    agreements = history.agreements.setdefault(members[0], Counter())
    if agreements[f"{name};{groups}"] < history.arrivals[name] and not is_capturing(current.device):
        agreed = current.reshape(1).clone()
        for group in members:
            dist.all_reduce(agreed, dist.ReduceOp.MAX, group)
        agreed = torch.where(agreed > 0, agreed, NEUTRAL_AMAX)
        history.agreed_amax.index_copy_(0, slots[index : index + 1], agreed)
        agreements[f"{name};{groups}"] += record_in != "never"
        return agreed.reshape(())
    if history.module_counts[name] == 1:  # the host knows the slot
        return history.agreed_amax[history.slots[name]].clone()
    return history.agreed_amax.index_select(0, slots[index : index + 1]).reshape(())


def _fake(current: Tensor, slots: Tensor, index: int, key: str, record_in: str, groups: str) -> Tensor:
    return torch.empty_like(current)


define_python_op(SCHEMA, fp8_first_amax, _fake)

"""The amax of a gathered tensor before it has a history: equal on all ranks of its groups."""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor

from ub_overlap import _torch_compat as compat

from . import delayed_cast
from .history import NEUTRAL_AMAX, SEPARATOR, AmaxHistory, is_capturing


def fill_empty_amax(
    history: AmaxHistory, x: Tensor, amax: Tensor, slot: Tensor, fixed: slice | None, key: str, record_in: str, groups: str
) -> Tensor:
    """Return float32 [1], above 0 and equal on all ranks of `groups`: `amax` [1], or the agreed amax where `amax` is 0.

    `slot` [1]: the history's slot. `fixed`: the same, where the host knows it. The ranks agree in the first call of a key,
    and in every call whose key never records. The number of calls decides, which is equal on all ranks."""
    members = [compat.group_of(group) for group in groups.split(SEPARATOR)]
    agreements = history.agreements.setdefault(members[0], Counter())
    if agreements[f"{key};{groups}"] < history.arrivals[key] and not is_capturing(x.device):
        agreed = delayed_cast.finite_amax(x.float()).reshape(1)
        for group in members:
            dist.all_reduce(agreed, dist.ReduceOp.MAX, group)
        agreed = torch.where(agreed > 0, agreed, NEUTRAL_AMAX)
        history.agreed_amax.index_copy_(0, slot, agreed)
        agreements[f"{key};{groups}"] += record_in != "never"
    else:
        agreed = history.agreed_amax.index_select(0, slot) if fixed is None else history.agreed_amax[fixed]
    return torch.where(amax > 0, amax, agreed * (1.0 / delayed_cast.HEADROOM))  # current values need no headroom

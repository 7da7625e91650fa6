"""What the ranks of a group take a gathered tensor's magnitude for before they know it: the same on all of them."""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor

from ub_overlap import _torch_compat as compat

from . import delayed_cast
from .history import NEUTRAL, SEPARATOR, AmaxHistory, capturing


def known(
    bank: AmaxHistory, x: Tensor, most: Tensor, column: Tensor, alone: slice | None, key: str, notes: str, groups: str
) -> Tensor:
    """float32 [1], above 0 and the same on all ranks of `groups`: `most` [1], or what the ranks agreed on where that is 0.

    They agree in the first call of a key, and in every one where nothing is ever noted. Calls tell which: all ranks make the
    same ones."""
    members = [compat.group_of(group) for group in groups.split(SEPARATOR)]
    agreements = bank.agreements.setdefault(members[0], Counter())
    if agreements[f"{key};{groups}"] < bank.came[key] and not capturing(x.device):
        agreed = delayed_cast.largest(x.float()).reshape(1)
        for group in members:
            dist.all_reduce(agreed, dist.ReduceOp.MAX, group)
        agreed = torch.where(agreed > 0, agreed, NEUTRAL)
        bank.agreed.index_copy_(0, column, agreed)
        agreements[f"{key};{groups}"] += notes != "never"
    else:
        agreed = bank.agreed.index_select(0, column) if alone is None else bank.agreed[alone]
    return torch.where(most > 0, most, agreed * (1.0 / delayed_cast.HEADROOM))  # current values take no headroom

"""finish_coalesced: return the results of the collective that start_coalesced began, one for each input.

It takes the token and the arguments of the start, with the same inputs. Sizes, reduce_op and dtypes are as in
finish_collective.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import finish_collective
from .coalesced_args import CoalescedArgs, each_collective
from .definition import OpDefinition

SCHEMA = (
    "finish_coalesced(Tensor token, Tensor[] inputs, str collective, str reduce_op, ScalarType[] out_dtypes, int split_slot, "
    "bool zero_copy, str strategy, str group, str site) -> Tensor[]"
)


class FinishCoalescedArgs(NamedTuple):
    token: Tensor
    inputs: list[Tensor]
    collective: str
    reduce_op: str
    out_dtypes: list[torch.dtype]
    split_slot: int
    zero_copy: bool
    strategy: str
    group: str
    site: str


def fake(a: FinishCoalescedArgs) -> list[Tensor]:
    """Return empty tensors of the results' sizes."""
    each = each_collective(CoalescedArgs(*a[1:]))
    return [finish_collective.fake(finish_collective.FinishArgs(a.token, *one)) for one in each]


DEFINITION = OpDefinition(SCHEMA, FinishCoalescedArgs, fake)

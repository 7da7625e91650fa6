"""The arguments of start_coalesced, which finish_coalesced takes again."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .start_args import StartArgs


class CoalescedArgs(NamedTuple):
    inputs: list[Tensor]
    collective: str
    reduce_op: str
    out_dtypes: list[torch.dtype]
    split_slot: int
    zero_copy: bool
    strategy: str
    group: str
    site: str


def each_collective(a: CoalescedArgs) -> list[StartArgs]:
    """Return the coalesced collective as collectives of one tensor each."""
    pairs = zip(a.inputs, a.out_dtypes, strict=True)
    return [StartArgs(x, a.collective, a.reduce_op, dtype, *a[4:]) for x, dtype in pairs]

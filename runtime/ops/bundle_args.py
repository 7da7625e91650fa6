"""The arguments of start_bundle, which finish_bundle takes again."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .start_args import StartArgs


class BundleArgs(NamedTuple):
    inputs: list[Tensor]
    collective: str
    reduce_op: str
    out_dtypes: list[torch.dtype]
    split_slot: int
    strategy: str
    group: str
    site: str


def each_collective(a: BundleArgs) -> list[StartArgs]:
    """Return the bundle as collectives of one tensor each."""
    pairs = zip(a.inputs, a.out_dtypes, strict=True)
    return [StartArgs(x, a.collective, a.reduce_op, dtype, a.split_slot, False, *a[5:]) for x, dtype in pairs]

"""finish_collective: return the result of the collective that start_collective began.

Legend: R ranks of the group; s rows of a shard.

    collective          input           result          (all on dim 0)
    "all_gather"        [s, ...]        [R * s, ...]
    "reduce_scatter"    [R * s, ...]    [s, ...]
    "all_reduce"        [...]           [...]

It takes the token and the arguments of the start, with the same input. reduce_op is "sum" or "avg"; an all_gather ignores it.
An all_gather also takes float8. out_dtype is the result's, as in bulk.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import bulk
from .definition import OpDefinition

SCHEMA = (
    "finish_collective(Tensor token, Tensor input, str collective, str reduce_op, ScalarType out_dtype, int split_slot, "
    "bool zero_copy, str strategy, str group, str site) -> Tensor"
)


class FinishArgs(NamedTuple):
    token: Tensor
    input: Tensor
    collective: str
    reduce_op: str
    out_dtype: torch.dtype
    split_slot: int
    zero_copy: bool
    strategy: str
    group: str
    site: str


def _bulk_args(a: FinishArgs) -> bulk.BulkArgs:
    return bulk.BulkArgs(a.input, [], [], a.collective, a.reduce_op, a.out_dtype, a.strategy, a.group, a.site)


def fake(a: FinishArgs) -> Tensor:
    """Return an empty tensor of the result's sizes."""
    return bulk.fake(_bulk_args(a))[0]


DEFINITION = OpDefinition(SCHEMA, FinishArgs, fake)

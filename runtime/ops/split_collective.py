"""start_collective, finish_collective: one collective as two ops, with any work between them.

Legend: R ranks of the group; s rows of a shard.

    collective          input           result          (all on dim 0)
    "all_gather"        [s, ...]        [R * s, ...]
    "reduce_scatter"    [R * s, ...]    [s, ...]
    "all_reduce"        [...]           [...]

reduce_op is "sum" or "avg"; an all_gather ignores it. An all_gather also takes float8.
out_dtype is the result's, as in bulk.

The token [1], uint8, orders finish after its start. It has no content. Finish takes the arguments of start, with the same
input, which must not be written between: the pushes read it. split_slot, 0 to 7, names the landing memory. A slot holds one
open collective. Strategies are "bulk", "bulk:chunks=N" and "none". Without a transport, or with "none", finish runs the plain
collective.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import bulk
from .definition import OpDefinition

_ARGUMENTS = (
    "Tensor input, str collective, str reduce_op, ScalarType out_dtype, int split_slot, str strategy, str group, str site"
)
START_SCHEMA = f"start_collective({_ARGUMENTS}) -> Tensor"
FINISH_SCHEMA = f"finish_collective(Tensor token, {_ARGUMENTS}) -> Tensor"


class StartArgs(NamedTuple):
    input: Tensor
    collective: str
    reduce_op: str
    out_dtype: torch.dtype
    split_slot: int
    strategy: str
    group: str
    site: str


class FinishArgs(NamedTuple):
    token: Tensor
    input: Tensor
    collective: str
    reduce_op: str
    out_dtype: torch.dtype
    split_slot: int
    strategy: str
    group: str
    site: str


def _bulk_args(a: FinishArgs) -> bulk.BulkArgs:
    return bulk.BulkArgs(a.input, [], [], a.collective, a.reduce_op, a.out_dtype, a.strategy, a.group, a.site)


def make_token(a: StartArgs) -> Tensor:
    """Return an empty token."""
    return a.input.new_empty((1,), dtype=torch.uint8)


def fake_finish(a: FinishArgs) -> Tensor:
    """Return an empty tensor of the result's sizes."""
    return bulk.fake(_bulk_args(a))[0]


def run_plain(a: FinishArgs) -> Tensor:
    """Run the collective with c10d."""
    return bulk.fallback(_bulk_args(a))[0]


START = OpDefinition(START_SCHEMA, StartArgs, make_token, make_token)
FINISH = OpDefinition(FINISH_SCHEMA, FinishArgs, fake_finish, run_plain)

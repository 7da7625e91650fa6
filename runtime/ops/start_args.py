"""The arguments of start_collective, which finish_collective takes again."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class StartArgs(NamedTuple):
    input: Tensor
    collective: str
    reduce_op: str
    out_dtype: torch.dtype
    split_slot: int
    zero_copy: bool
    strategy: str
    group: str
    site: str


def make_token(like: Tensor) -> Tensor:
    """Return what a start returns: a token, which orders finish after start and has no content."""
    return like.new_empty((1,), dtype=torch.uint8)

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

"""Plain collectives of a row, over NCCL or gloo."""

from __future__ import annotations

from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from ub_overlap.tools.rank_process import World


class RowCollectives(Protocol):
    """Plain collectives of the group that a row is for. `ranks`: its size."""

    ranks: int

    def gather(self, out: Tensor, shard: Tensor) -> None:
        """Fill `out` with the shards of all ranks, along the first dim."""

    def scatter(self, out: Tensor, whole: Tensor) -> None:
        """Fill `out` with this rank's shard of the sum of `whole` over all ranks."""


class C10dCollectives:
    """Collectives of the default group."""

    def __init__(self, world: World) -> None:
        self.ranks = world.ranks

    def gather(self, out: Tensor, shard: Tensor) -> None:
        dist.all_gather_into_tensor(out, shard)

    def scatter(self, out: Tensor, whole: Tensor) -> None:
        dist.reduce_scatter_tensor(out, whole)

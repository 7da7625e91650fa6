"""The results of collectives in a mirrored group, by plain collectives of the two processes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ub_overlap.tools.rank_process import World


class MirrorCollectives:
    """Collectives whose ranks 1 to R-1 are all the other process. For comparison only: their time means nothing."""

    def __init__(self, world: World, ranks: int) -> None:
        self.world, self.ranks = world, ranks

    def gather(self, out: Tensor, shard: Tensor) -> None:
        """Fill `out`, R shards along its first dim: this process's, then R-1 times the other one's."""
        both = torch.empty(2 * shard.shape[0], *shard.shape[1:], device=shard.device, dtype=shard.dtype)
        dist.all_gather_into_tensor(both, shard.contiguous())
        parts = out.view(self.ranks, *shard.shape)
        parts.copy_(both.view(2, *shard.shape)[1 - self.world.rank].expand_as(parts))
        parts[0].copy_(shard)

    def scatter(self, out: Tensor, whole: Tensor) -> None:
        """Fill `out` with the sum of this process's first shard and the other one's further shards."""
        shards = whole.view(self.ranks, *out.shape)
        sent = shards[1:].sum(0, dtype=torch.float32)
        both = torch.empty(2, *sent.shape, device=sent.device)
        dist.all_gather_into_tensor(both.view(2 * sent.shape[0], *sent.shape[1:]), sent)
        out.copy_(both[1 - self.world.rank] + shards[0].float())

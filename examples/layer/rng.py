"""Dropout masks that are reproducible and consistent over ranks.

A mask of a sharded activation must differ between the shards; a mask of a replicated activation must not. DTensor's RNG tracker
does that with one seed for all ranks of a mesh: each rank draws at the offset of its shard in the full tensor. The masks are
drawn outside the compiled layer and passed to it, since the compiler may reorder random numbers inside a graph. So two
variants of a layer can use the same masks.

DTensor has a tracker for CUDA only. On the CPU every rank draws the whole mask from the same generator and keeps its shard.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.tensor as dtensor
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard


class Masks:
    """Draws masks for the ranks of the 1D `mesh`. All ranks must draw the same masks in the same order.

    `replica`: data-parallel replicas have their own masks. All ranks of all replicas construct it together."""

    def __init__(self, mesh: DeviceMesh, *, seed: int, replica: int = 0) -> None:
        self.mesh, self.cpu = mesh, mesh.device_type == "cpu"
        self.generator = torch.Generator()
        if self.cpu:
            self.generator.manual_seed(seed + 1 + replica)
            return
        torch.manual_seed(seed)
        # The first draw creates the tracker, which gives all ranks of the world the state of rank 0. Seed after it.
        dtensor.rand((mesh.size(),), device_mesh=mesh, placements=[Shard(0)])
        torch.manual_seed(seed + 1 + replica)

    def draw(self, shape: tuple[int, ...], placement: Placement, probability: float) -> Tensor:
        """Return this rank's part of a boolean mask of the full `shape`; an element is False with `probability`."""
        if not self.cpu:
            return dtensor.rand(shape, device_mesh=self.mesh, placements=[placement]).to_local() >= probability
        whole = torch.rand(shape, generator=self.generator)
        if isinstance(placement, Shard):
            whole = whole.chunk(self.mesh.size(), placement.dim)[self.mesh.get_local_rank()]
        return whole >= probability

    def check(self) -> None:
        """Raise RuntimeError unless shards of a mask differ between ranks and copies agree. All ranks together."""
        ranks, group = self.mesh.size(), self.mesh.get_group()
        for placement, distinct in ((Shard(0), ranks), (Replicate(), 1)):
            mine = self.draw((64 * (ranks if distinct > 1 else 1),), placement, 0.5).to(torch.uint8)
            all_masks = [torch.empty_like(mine) for _ in range(ranks)]
            dist.all_gather(all_masks, mine, group=group)
            different = len({bytes(mask.tolist()) for mask in all_masks})
            if different != distinct:
                raise RuntimeError(
                    f"dropout masks placed {placement}: {different} different masks on {ranks} ranks, expected {distinct}"
                )

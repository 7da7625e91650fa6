"""Dropout masks that are the same in every run, and the right ones on every rank.

A mask of a sharded activation must differ between the shards, a mask of a replicated one must not. DTensor's RNG tracker does
that with one seed for all ranks of a mesh: each rank draws at the offset of its shard in the whole tensor. The masks are drawn
here, beside the compiled layer, and are handed to it: so they are the same whatever the compiler does with the layer (random
numbers inside a compiled graph come in an order of the compiler's own), and two variants of a layer can get the same masks.

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
    """Draws masks for the ranks of the 1D `mesh`, all of which must ask for the same ones in the same order. `replica`: data
    parallel replicas get masks of their own. All ranks of all replicas must make theirs together."""

    def __init__(self, mesh: DeviceMesh, *, seed: int, replica: int = 0) -> None:
        self.mesh, self.cpu = mesh, mesh.device_type == "cpu"
        self.generator = torch.Generator()
        if self.cpu:
            self.generator.manual_seed(seed + 1 + replica)
            return
        torch.manual_seed(seed)
        # The first draw of a process makes the tracker, which gives all ranks of the world the state of rank 0. Seed after it.
        dtensor.rand((mesh.size(),), device_mesh=mesh, placements=[Shard(0)])
        torch.manual_seed(seed + 1 + replica)

    def draw(self, shape: tuple[int, ...], placement: Placement, probability: float) -> Tensor:
        """This rank's part of a boolean mask of the whole `shape`; an element is False with `probability`."""
        if not self.cpu:
            return dtensor.rand(shape, device_mesh=self.mesh, placements=[placement]).to_local() >= probability
        whole = torch.rand(shape, generator=self.generator)
        if isinstance(placement, Shard):
            whole = whole.chunk(self.mesh.size(), placement.dim)[self.mesh.get_local_rank()]
        return whole >= probability

    def check(self) -> None:
        """RuntimeError unless shards of a mask differ between the ranks and copies of a mask agree. All ranks together."""
        ranks, group = self.mesh.size(), self.mesh.get_group()
        for placement, distinct in ((Shard(0), ranks), (Replicate(), 1)):
            mine = self.draw((64 * (ranks if distinct > 1 else 1),), placement, 0.5).to(torch.uint8)
            all_masks = [torch.empty_like(mine) for _ in range(ranks)]
            dist.all_gather(all_masks, mine, group=group)
            found = len({bytes(mask.tolist()) for mask in all_masks})
            if found != distinct:
                raise RuntimeError(f"dropout masks placed {placement}: {found} different ones on {ranks} ranks, not {distinct}")

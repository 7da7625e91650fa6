"""DTensor MLP whose input is a DTensor, so that DTensor pads and trims uneven sequence shards.

Legend: B batch, S sequence, D width, F feed-forward width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.models.case import Case, Expected, Sites, noise, settle
from tests.models.dtensor_llama import tensor_mesh


class MLP(nn.Module):
    """MLP from the local shard of x [B, S, D] to the local shard of the result, over DTensors with S = `length` in all."""

    def __init__(self, dim: int, hidden: int, bias: bool, mesh: object, shape: tuple[int, ...], along: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden, bias=bias)
        self.down = nn.Linear(hidden, dim, bias=bias)
        self.mesh, self.shape, self.along = mesh, shape, along

    def forward(self, x: Tensor) -> Tensor:
        stride = (self.shape[1] * self.shape[2], self.shape[2], 1)
        whole = DTensor.from_local(
            x, self.mesh, [Shard(self.along)], run_check=False, shape=torch.Size(self.shape), stride=stride
        )
        out = self.down(F.gelu(self.up(whole.redistribute(placements=[Replicate()]))))
        return out.redistribute(placements=[Shard(self.along)]).to_local()


def build(
    rank: int,
    world: int,
    batch: int = 2,
    length: int = 16,
    bias: bool = False,
    along: int = 1,
    two_dims: bool = False,
    dtype: torch.dtype = torch.float32,
    exact: bool = False,
    dynamic: bool | None = None,
    hidden: int = 96,
) -> Case:
    """Build the MLP. The ranks need not divide `length` and `hidden`. `along`: the sharded dim of x."""
    mesh = tensor_mesh(world, two_dims)
    torch.manual_seed(7)
    shape = (batch, length, 64)
    module = settle(MLP(64, hidden, bias, mesh, shape, along), dtype, exact)
    plan = {
        "up": ColwiseParallel(use_local_output=False),
        "down": RowwiseParallel(output_layouts=Shard(along), use_local_output=False),
    }
    parallelize_module(module, mesh, plan)
    x = noise(shape, 11, dtype, exact, grad=False)
    size = -(-shape[along] // mesh.size())
    start = mesh.get_local_rank() * size
    mine = x.narrow(along, start, max(0, min(size, shape[along] - start))).clone().requires_grad_()
    uneven = "padded and trimmed" if shape[along] % mesh.size() else ""
    expected = Expected(Sites(gather=1, scatter=1), Sites(gather=1, scatter=1, contracted=1), uneven, uneven)
    return Case(module, (mine,), expected, dynamic=dynamic)

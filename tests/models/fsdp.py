"""MLP with weights gathered in the forward, as in SimpleFSDP.

Parameters are Shard(0) DTensors, replicated inside a parametrization.
Legend: M rows of the local batch, D width, F feed-forward width; a weight [F, D] is stored as [F / R, D].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from tests.models.case import Case, Expected, Sites, device, noise, settle


class Gathered(nn.Module):
    """Linear with a weight that is Shard(0) over the last dim of `mesh` and replicated over the others.

    It is gathered in dtype `param`. Its gradient is reduced in dtype `reduce`.
    """

    def __init__(
        self, rows: int, columns: int, mesh: DeviceMesh, param: torch.dtype | None, reduce: torch.dtype | None
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, columns) / columns**0.5)
        self.mesh, self.param, self.reduce = mesh, param, reduce

    def shard(self) -> None:
        """Replace the full weight by this rank's shard. Call after dtype changes."""
        replicas = [Replicate()] * (self.mesh.ndim - 1)
        self.weight = nn.Parameter(distribute_tensor(self.weight.detach(), self.mesh, [*replicas, Shard(0)]))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        assert isinstance(weight, DTensor)
        everywhere, each = [Replicate()] * self.mesh.ndim, [Partial("avg")] * self.mesh.ndim
        whole = weight.redistribute(placements=everywhere, forward_dtype=self.param, backward_dtype=self.reduce)
        return F.linear(x, whole.to_local(grad_placements=each))


class MLP(nn.Module):
    """MLP of gathered linears. [M, D] or [B, S, D] -> the same."""

    def __init__(self, dim: int, hidden: int, mesh: DeviceMesh, param: torch.dtype | None, reduce: torch.dtype | None) -> None:
        super().__init__()
        self.up = Gathered(hidden, dim, mesh, param, reduce)
        self.down = Gathered(dim, hidden, mesh, param, reduce)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def build(
    rank: int,
    world: int,
    mixed: bool = False,
    dims: int = 2,
    dtype: torch.dtype = torch.float32,
    exact: bool = False,
    dynamic: bool | None = None,
    replicas: int = 1,
) -> Case:
    """Build the MLP.

    `mixed`: parameters in `dtype`, gathered and multiplied in bf16, gradients reduced in `dtype` (SimpleFSDP's mixed
    precision). `replicas`: the weights are sharded over world / replicas ranks and replicated (SimpleFSDP's hybrid_shard).

    Forward: one gather per linear, on the right operand. Backward: one weight gradient -> reduce_scatter per linear; gathered
    weights are saved, so no weight is gathered again. With replicas: weight gradient -> all_reduce -> reduce_scatter.
    """
    if replicas > 1:
        mesh = DeviceMesh(device().type, torch.arange(world).view(replicas, -1), mesh_dim_names=("replicate", "shard"))
        backward = Sites(reduce=2, plain_scatter=2)
    else:
        mesh = DeviceMesh(device().type, torch.arange(world), mesh_dim_names=("fsdp",))
        backward = Sites(scatter=2)
    low = (torch.float64 if exact else torch.bfloat16) if mixed else None
    high = (torch.float64 if exact else dtype) if mixed else None
    torch.manual_seed(7)
    module = settle(MLP(64, 96, mesh, low, high), dtype, exact)
    assert isinstance(module, MLP)
    module.up.shard()
    module.down.shard()
    x = noise((24, 64) if dims == 2 else (2, 12, 64), 11 + rank, torch.bfloat16 if mixed else dtype, exact)
    return Case(module, (x,), Expected(Sites(gather=2), backward), dynamic=dynamic)

"""In-graph ZeRO-3: a stack of blocks whose weights are shards, gathered where they are used.

Legend: M rows of the local batch, D width; a weight [D, D] is stored as [D / R, D]. The gather is a functional collective with
autograd, so the gradient of each weight is reduce-scattered.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.case import Case, Expected, noise, settle


class Sharded(nn.Module):
    """A linear whose weight is this rank's shard. `compute`: the type in which it is gathered."""

    def __init__(self, width: int, rank: int, world: int, compute: torch.dtype | None) -> None:
        super().__init__()
        whole = torch.randn(width, width) / width**0.5
        self.weight = nn.Parameter(whole.chunk(world)[rank].clone())
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight if self.compute is None else self.weight.to(self.compute)
        return F.linear(x, funcol.all_gather_tensor_autograd(weight, 0, dist.group.WORLD))


class Net(nn.Module):
    """Blocks of a norm, two linears and a residual. [M, D] -> the same."""

    def __init__(self, width: int, layers: int, rank: int, world: int, compute: torch.dtype | None) -> None:
        super().__init__()
        linears = [Sharded(width, rank, world, compute) for _ in range(2 * layers)]
        self.up, self.down = nn.ModuleList(linears[::2]), nn.ModuleList(linears[1::2])

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(F.gelu(up(F.layer_norm(x, x.shape[-1:]))))
        return x


def build(
    rank: int,
    world: int,
    layers: int = 3,
    width: int = 64,
    mixed: bool = False,
    dtype: torch.dtype = torch.float32,
    exact: bool = False,
    dynamic: bool | None = None,
) -> Case:
    """Build the stack. `mixed`: parameters in `dtype`, gathered and multiplied in bf16, gradients reduced in bf16."""
    torch.manual_seed(7)
    compute = (torch.float64 if exact else torch.bfloat16) if mixed else None
    module = settle(Net(width, layers, rank, world, compute), dtype, exact)
    x = noise((24, width), 11 + rank, torch.bfloat16 if mixed else dtype, exact)
    return Case(module, (x,), Expected(), dynamic=dynamic)

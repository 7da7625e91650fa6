"""Column- and row-parallel MLP and attention on functional collectives, as in Megatron-LM's mappings.

Legend: S sequence (S/R per rank), B batch, D width, F feed-forward width, H heads. Megatron's layout is [S, B, D], gathered on
dim 0; `gather_dim=1` is [B, S, D]; `dims=2` is [S, D].
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.case import Case, Expected, Sites, noise, settle


class GatherFromSequence(torch.autograd.Function):
    """All-gather in the forward, reduce-scatter in the backward (Megatron's _GatherFromSequenceParallelRegion)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: str) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return funcol.all_gather_tensor(x, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return funcol.reduce_scatter_tensor(gradient.contiguous(), "sum", ctx.dim, ctx.group), None, None


class ReduceScatterToSequence(torch.autograd.Function):
    """Reduce-scatter in the forward, all-gather in the backward (Megatron's _ReduceScatterToSequenceParallelRegion)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: str) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return funcol.reduce_scatter_tensor(x, "sum", dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return funcol.all_gather_tensor(gradient.contiguous(), ctx.dim, ctx.group), None, None


class CopyToTensorParallel(torch.autograd.Function):
    """Identity in the forward, all-reduce in the backward (Megatron's _CopyToModelParallelRegion)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return funcol.all_reduce(gradient.contiguous(), "sum", ctx.group), None


class ReduceFromTensorParallel(torch.autograd.Function):
    """All-reduce in the forward, identity in the backward (Megatron's _ReduceFromModelParallelRegion)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        return funcol.all_reduce(x, "sum", group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Mappings(nn.Module):
    """Entry and exit of a tensor-parallel region.

    `style`: "functional" (torch's autograd forms), "function" (the classes above) or "reduce" (no sequence parallelism: copy
    and all-reduce).
    """

    def __init__(self, style: str, dim: int, group: str) -> None:
        super().__init__()
        self.style, self.dim, self.group = style, dim, group

    def enter(self, x: Tensor) -> Tensor:
        if self.style == "functional":
            return funcol.all_gather_tensor_autograd(x, self.dim, self.group)
        if self.style == "function":
            return GatherFromSequence.apply(x, self.dim, self.group)
        return CopyToTensorParallel.apply(x, self.group)

    def leave(self, x: Tensor) -> Tensor:
        if self.style == "functional":
            return funcol.reduce_scatter_tensor_autograd(x, "sum", self.dim, self.group)
        if self.style == "function":
            return ReduceScatterToSequence.apply(x, self.dim, self.group)
        return ReduceFromTensorParallel.apply(x, self.group)


class MLP(nn.Module):
    """enter -> w1 (and w3 if gated) -> activation -> w2 -> leave. Weights are this rank's F / R shard."""

    def __init__(self, dim: int, hidden: int, ends: Mappings, bias: bool, gated: bool) -> None:
        super().__init__()
        self.ends = ends
        self.w1 = nn.Linear(dim, hidden, bias=bias)
        self.w2 = nn.Linear(hidden, dim, bias=bias)
        self.w3 = nn.Linear(dim, hidden, bias=bias) if gated else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.ends.enter(x)
        h = F.gelu(self.w1(x)) if self.w3 is None else F.silu(self.w1(x)) * self.w3(x)
        return self.ends.leave(self.w2(h))


class Attention(nn.Module):
    """enter -> fused qkv -> causal attention over this rank's heads -> projection -> leave.

    The sequence is dim `along` of the 3D input.
    """

    def __init__(self, dim: int, heads: int, world: int, ends: Mappings, bias: bool, along: int) -> None:
        super().__init__()
        self.ends, self.along, self.head_dim = ends, along, dim // heads
        self.qkv = nn.Linear(dim, 3 * dim // world, bias=bias)
        self.projection = nn.Linear(dim // world, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.ends.enter(x)
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in self.qkv(x).chunk(3, -1))
        to_heads = (1, 2, 0, 3) if self.along == 0 else (0, 2, 1, 3)  # [B, H, S, d]
        back = (2, 0, 1, 3) if self.along == 0 else (0, 2, 1, 3)
        out = F.scaled_dot_product_attention(q.permute(to_heads), k.permute(to_heads), v.permute(to_heads), is_causal=True)
        return self.ends.leave(self.projection(out.permute(back).flatten(2)))


class Layer(nn.Module):
    """Pre-norm transformer layer with residuals."""

    def __init__(self, dim: int, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention, self.mlp = attention, mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.second(x))


def build(
    rank: int,
    world: int,
    part: str = "mlp",
    style: str = "functional",
    gather_dim: int = 0,
    dims: int = 3,
    batch: int = 2,
    bias: bool = False,
    gated: bool = False,
    layers: int = 1,
    local: int = 8,
    dtype: torch.dtype = torch.float32,
    exact: bool = False,
    dynamic: bool | None = None,
) -> Case:
    """Build a part of the model.

    `part`: "mlp", "attention" or "layer" (both, `layers` times). `local`: S / R. `style`: see `Mappings`.
    """
    dim, hidden, heads = 64, 96, 8
    group = dist.group.WORLD.group_name
    torch.manual_seed(100 + rank)

    def mlp() -> nn.Module:
        return MLP(dim, math.ceil(hidden / world), Mappings(style, gather_dim, group), bias, gated)

    def attention() -> nn.Module:
        return Attention(dim, heads, world, Mappings(style, gather_dim, group), bias, gather_dim)

    parts = {
        "mlp": mlp,
        "attention": attention,
        "layer": lambda: nn.Sequential(*(Layer(dim, attention(), mlp()) for _ in range(layers))),
    }
    module = settle(parts[part](), dtype, exact)
    rows = local * world if style == "reduce" else local
    shape = (rows, dim) if dims == 2 else (rows, batch, dim) if gather_dim == 0 else (batch, rows, dim)
    regions = 2 * layers if part == "layer" else 1
    if style == "reduce":
        expected = Expected(Sites(reduce=regions), Sites(reduce=regions))
    else:
        expected = Expected(Sites(gather=regions, scatter=regions), Sites(gather=regions, scatter=regions, contracted=regions))
    seed = 11 if style == "reduce" else 11 + rank
    return Case(module, (noise(shape, seed, dtype, exact),), expected, dynamic=dynamic)

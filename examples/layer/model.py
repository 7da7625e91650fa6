"""The layers and their tensor parallelism.

Legend: S positions, B sequences, H hidden size, A heads, E = H / A, F MLP size, T ranks of a tensor-parallel group.

Positions are the first dim, x [S, B, H], so a rank's shard [S/T, B, H] is one block of memory. Each layer begins with an
all_gather of the normed x before its column-parallel linear and ends with a reduce_scatter after its row-parallel linear.
Backward has the reverse. The backend hides these collectives.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


def drop(x: Tensor, keep: Tensor | None, probability: float) -> Tensor:
    """Apply dropout with a given mask (see rng.py): x / (1 - p) where `keep`, 0 elsewhere; x without a mask."""
    return x if keep is None else torch.where(keep, x * (1.0 / (1.0 - probability)), 0.0)


class LayerNormMLP(nn.Module):
    """down(gelu(up(norm(x)))), [S, B, H] -> [S, B, H]."""

    def __init__(self, hidden: int, mlp: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, mlp)
        self.down = nn.Linear(mlp, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(x)), approximate="tanh"))


class LayerNormAttention(nn.Module):
    """Causal self-attention of norm(x), [S, B, H] -> [S, B, H]. The rows of qkv are ordered head by head: (A, 3, E)."""

    def __init__(self, hidden: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.norm = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.proj = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """The head count is view(-1): under tensor parallelism qkv returns this rank's heads only."""
        qkv = self.qkv(self.norm(x))
        s, b, _ = qkv.shape
        q, k, v = qkv.view(s, b, -1, 3, self.head_dim).permute(3, 1, 2, 0, 4).unbind(0)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(out.permute(2, 0, 1, 3).reshape(s, b, -1))


class MLPLayer(nn.Module):
    """A LayerNorm-MLP with dropout: one mask."""

    masks = 1

    def __init__(self, hidden: int, head_dim: int, mlp: int, dropout: float) -> None:
        super().__init__()
        self.mlp = LayerNormMLP(hidden, mlp)
        self.dropout = dropout

    def forward(self, x: Tensor, keep: tuple[Tensor | None, ...]) -> Tensor:
        return drop(self.mlp(x), keep[0], self.dropout)


class TransformerLayer(nn.Module):
    """A transformer block: x + drop(attention), then + drop(MLP): two masks."""

    masks = 2

    def __init__(self, hidden: int, head_dim: int, mlp: int, dropout: float) -> None:
        super().__init__()
        self.attention = LayerNormAttention(hidden, head_dim)
        self.mlp = LayerNormMLP(hidden, mlp)
        self.dropout = dropout

    def forward(self, x: Tensor, keep: tuple[Tensor | None, ...]) -> Tensor:
        x = x + drop(self.attention(x), keep[0], self.dropout)
        return x + drop(self.mlp(x), keep[1], self.dropout)


LAYERS: dict[str, type[MLPLayer] | type[TransformerLayer]] = {"mlp": MLPLayer, "block": TransformerLayer}


class Stack(nn.Module):
    """A stack of layers. `keep`: the masks of all layers in order, or none without dropout."""

    def __init__(self, kind: str, num_layers: int, *, hidden: int, head_dim: int, mlp: int, dropout: float) -> None:
        super().__init__()
        layer = LAYERS[kind]
        self.masks = layer.masks * num_layers
        self.layers = nn.ModuleList(layer(hidden, head_dim, mlp, dropout) for _ in range(num_layers))

    def init_weights(self, seed: int) -> None:
        """Draw all weights from `seed`, the same on every rank. Call it before the layers are distributed."""
        generator = torch.Generator().manual_seed(seed)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=weight.shape[1] ** -0.5, generator=generator)
            elif name.endswith("norm.weight"):
                nn.init.ones_(weight)
            else:
                nn.init.zeros_(weight)

    def forward(self, x: Tensor, *keep: Tensor) -> Tensor:
        each = self.masks // len(self.layers)
        for i, layer in enumerate(self.layers):
            x = layer(x, keep[i * each : (i + 1) * each] if keep else (None,) * each)
        return x


def parallelize(stack: Stack, mesh: DeviceMesh) -> Stack:
    """Distribute `stack` in place over the 1D `mesh`: linears by columns and rows, everything between them by positions."""
    plan: dict[str, ParallelStyle] = {}
    for i in range(len(stack.layers)):
        for norm, column, row in (("mlp.norm", "mlp.up", "mlp.down"), ("attention.norm", "attention.qkv", "attention.proj")):
            if norm.startswith("attention") and not hasattr(stack.layers[i], "attention"):
                continue
            plan[f"layers.{i}.{norm}"] = SequenceParallel(sequence_dim=0)
            plan[f"layers.{i}.{column}"] = ColwiseParallel(input_layouts=Shard(0))
            plan[f"layers.{i}.{row}"] = RowwiseParallel(output_layouts=Shard(0))
    parallelize_module(stack, mesh, plan)
    return stack

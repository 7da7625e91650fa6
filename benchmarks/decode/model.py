"""Layers of a Llama in a decode step: one token of each of B sequences, with tensor parallelism.

Each rank has its heads and its columns of the feed-forward, and reduces the products of `wo` and `w2`. All variants of a
measurement share weights and caches.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..blocks.model import BlockSizes, fresh_code, linear

Reduce = Callable[[Tensor], Tensor]
"""A partial product -> its sum over ranks."""


class DecodeLayer(nn.Module):
    """[B, 1, D] -> the same. Its cache holds `context` tokens of each sequence, the last of which is the new one."""

    def __init__(self, sizes: BlockSizes, ranks: int) -> None:
        super().__init__()
        dim, q, kv, wide = sizes.dim, sizes.dim // ranks, sizes.kv_heads * sizes.head_dim // ranks, sizes.wide // ranks
        self.head_dim = sizes.head_dim
        self.attention_norm, self.ffn_norm = nn.RMSNorm(dim, eps=1e-5), nn.RMSNorm(dim, eps=1e-5)
        self.wq, self.wk, self.wv, self.wo = linear(dim, q), linear(dim, kv), linear(dim, kv), linear(q, dim)
        self.w1, self.w3, self.w2 = linear(dim, wide), linear(dim, wide), linear(wide, dim)
        self.keys = self.values = torch.empty(0)

    def make_cache(self, batch: int, context: int) -> None:
        """Replace the cache by a random one."""
        weight = self.wk.weight
        shape = (batch, weight.shape[0] // self.head_dim, context, self.head_dim)
        self.keys, self.values = (torch.randn(shape, device=weight.device).to(weight.dtype) for _ in range(2))

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        self.keys[:, :, -1:] = k
        self.values[:, :, -1:] = v
        out = F.scaled_dot_product_attention(q, self.keys, self.values, enable_gqa=True)
        return self.wo(out.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, reduce: Reduce) -> Tensor:
        h = x + reduce(self.attend(self.attention_norm(x)))
        y = self.ffn_norm(h)
        return h + reduce(self.w2(F.silu(self.w1(y)) * self.w3(y)))


class DecodeModel(nn.Module):
    """Layers and the norm behind the last one. `reduce`: how products are summed over ranks."""

    def __init__(self, layers: nn.ModuleList, norm: nn.Module, reduce: Reduce) -> None:
        super().__init__()
        self.layers, self.norm, self.reduce = layers, norm, reduce

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, self.reduce)
        return self.norm(x)


def make_layers(sizes: BlockSizes, ranks: int, count: int, device: torch.device, dtype: torch.dtype) -> DecodeModel:
    """Return layers with random weights of this rank, and norms that are equal on all ranks. They reduce nothing."""
    with torch.device(device):
        layers = nn.ModuleList(DecodeLayer(sizes, ranks) for _ in range(count))
        norm = nn.RMSNorm(sizes.dim, eps=1e-5)
    return DecodeModel(layers, norm, lambda partial: partial).to(dtype).requires_grad_(False)


def with_reduce(model: DecodeModel, reduce: Reduce) -> nn.Module:
    """Return a model of the same weights and caches that sums products by `reduce`, with graphs of its own."""
    return fresh_code(DecodeModel(model.layers, model.norm, reduce))

"""A Llama block, or its norm and feed-forward alone: the tensor- and sequence-parallel form, and the compute of one rank.

Legend: S tokens (S/R per rank between layers), D width, F feed-forward width, R ranks; batch 1.
"""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


@dataclass(frozen=True)
class BlockSizes:
    """D, F, query heads, key/value heads."""

    dim: int
    wide: int
    heads: int
    kv_heads: int

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


SIZES = {"8b": BlockSizes(4096, 14336, 32, 8), "70b": BlockSizes(8192, 28672, 64, 8), "tiny": BlockSizes(64, 128, 8, 8)}


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def attend(q: Tensor, k: Tensor, v: Tensor, head_dim: int) -> Tensor:
    """Return causal attention of this rank's heads: [1, S, heads * head_dim] each -> the shape of q."""
    q, k, v = (t.view(1, t.shape[1], -1, head_dim).transpose(1, 2) for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2).reshape(1, out.shape[2], -1)


class LlamaAttention(nn.Module):
    def __init__(self, sizes: BlockSizes) -> None:
        super().__init__()
        self.head_dim, kv_dim = sizes.head_dim, sizes.kv_heads * sizes.head_dim
        self.wq, self.wk, self.wv = linear(sizes.dim, sizes.dim), linear(sizes.dim, kv_dim), linear(sizes.dim, kv_dim)
        self.wo = linear(sizes.dim, sizes.dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.wo(attend(self.wq(x), self.wk(x), self.wv(x), self.head_dim))


class LlamaFeedForward(nn.Module):
    def __init__(self, sizes: BlockSizes) -> None:
        super().__init__()
        self.w1, self.w3 = linear(sizes.dim, sizes.wide), linear(sizes.dim, sizes.wide)
        self.w2 = linear(sizes.wide, sizes.dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class LlamaBlock(nn.Module):
    """[1, S/R, D] of this rank -> the same."""

    def __init__(self, sizes: BlockSizes) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(sizes.dim), LlamaAttention(sizes)
        self.ffn_norm, self.ffn = nn.RMSNorm(sizes.dim), LlamaFeedForward(sizes)

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x))
        return h + self.ffn(self.ffn_norm(h))


class LlamaMlp(nn.Module):
    """Norm and feed-forward, without the residual: [1, S/R, D] of this rank -> the same."""

    def __init__(self, sizes: BlockSizes) -> None:
        super().__init__()
        self.ffn_norm, self.ffn = nn.RMSNorm(sizes.dim), LlamaFeedForward(sizes)

    def forward(self, x: Tensor) -> Tensor:
        return self.ffn(self.ffn_norm(x))


MODELS = {"block": LlamaBlock, "mlp": LlamaMlp}


def parallel(
    sizes: BlockSizes, mesh: Any, device: torch.device, dtype: torch.dtype, layers: int = 1, model: str = "block"
) -> nn.Module:
    """Return `layers` models as DTensors over `mesh`: sequence-parallel norms, column- and row-parallel layers."""
    torch.manual_seed(1)
    return stack([parallel_block(sizes, mesh, device, dtype, model) for _ in range(layers)])


def stack(blocks: list[nn.Module]) -> nn.Module:
    """Return one block as it is, and several as a Sequential."""
    return blocks[0] if len(blocks) == 1 else fresh_code(nn.Sequential(*blocks))


def parallel_block(sizes: BlockSizes, mesh: Any, device: torch.device, dtype: torch.dtype, model: str = "block") -> nn.Module:
    """Return one block with new weights. All ranks draw the same ones, so each keeps its shards without communication."""
    with torch.device(device):
        block = fresh_code(MODELS[model](sizes).to(dtype))
    gathered = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    parts = {"attention": (("wq", "wk", "wv"), "wo"), "ffn": (("w1", "w3"), "w2")}
    plan: dict[str, Any] = {}
    for part, (columns, rows) in parts.items():
        if hasattr(block, part):
            plan |= {f"{part}_norm": SequenceParallel(), part: gathered}
            plan |= {f"{part}.{name}": ColwiseParallel() for name in columns}
            plan |= {f"{part}.{rows}": RowwiseParallel(output_layouts=Shard(1))}
    return parallelize_module(block, mesh, plan, src_data_rank=None)


def compute_only(
    sizes: BlockSizes,
    ranks: int,
    tokens: int,
    device: torch.device,
    dtype: torch.dtype,
    layers: int = 1,
    model: str = "block",
) -> nn.Module:
    """Return the compute of one rank. A gather is a view of an existing full-size tensor, a scatter a part of its input.

    In backward it is the other way round. The values have no meaning; only the time counts."""
    full = torch.randn(1, tokens, sizes.dim, device=device, dtype=dtype)
    shard_tokens = tokens // ranks

    class ViewGather(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return full.detach().view(1, tokens, sizes.dim)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            return grads[0][:, :shard_tokens]

    class ViewScatter(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x[:, :shard_tokens].clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            return full.detach().view(1, tokens, sizes.dim)

    class ComputeOnly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            dim, q, kv, wide = sizes.dim, sizes.dim // ranks, sizes.kv_heads * sizes.head_dim // ranks, sizes.wide // ranks
            self.ffn_norm = nn.RMSNorm(dim)
            self.w1, self.w3, self.w2 = linear(dim, wide), linear(dim, wide), linear(wide, dim)
            if model == "block":
                self.attention_norm = nn.RMSNorm(dim)
                self.wq, self.wk, self.wv, self.wo = linear(dim, q), linear(dim, kv), linear(dim, kv), linear(q, dim)

        def forward(self, x: Tensor) -> Tensor:
            if model == "mlp":
                return self.feed_forward(x)
            y = ViewGather.apply(self.attention_norm(x))
            h = x + ViewScatter.apply(self.wo(attend(self.wq(y), self.wk(y), self.wv(y), sizes.head_dim)))
            return h + self.feed_forward(h)

        def feed_forward(self, x: Tensor) -> Tensor:
            y = ViewGather.apply(self.ffn_norm(x))
            return ViewScatter.apply(self.w2(F.silu(self.w1(y)) * self.w3(y)))

    with torch.device(device):
        return stack([fresh_code(ComputeOnly().to(dtype)) for _ in range(layers)])


def fresh_code(block: nn.Module) -> nn.Module:
    """Give `block` a forward with its own code object. Dynamo caches graphs by code object; variants must not share them."""
    old: Any = type(block).forward
    new = types.FunctionType(old.__code__.replace(), old.__globals__, old.__name__, old.__defaults__, old.__closure__)
    block.__class__ = type(type(block).__name__, (type(block),), {"forward": new})
    return block

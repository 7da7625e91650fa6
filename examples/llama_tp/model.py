"""A Llama-architecture language model in plain PyTorch: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Legend: B sequences, S positions, D model dim, H query heads, G key and value heads, E = D / H, F feed-forward dim,
V vocabulary. The model is independent of ranks: `parallelize.py` distributes the modules by name; H and G are then per rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelArgs:
    """Sizes of the model. `dim` must divide by `num_heads`, `num_heads` by `num_kv_heads`, and dim / num_heads must be even."""

    dim: int = 256
    num_layers: int = 2
    num_heads: int = 8
    num_kv_heads: int = 4
    hidden_dim: int = 768
    vocab_size: int = 256
    max_seq_len: int = 256
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        if self.dim % self.num_heads or self.dim // self.num_heads % 2:
            raise ValueError(f"dim={self.dim} must be an even multiple of num_heads={self.num_heads}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} must divide by num_kv_heads={self.num_kv_heads}")


def rope_table(head_dim: int, max_seq_len: int, theta: float) -> Tensor:
    """Return cosines and sines of the rotary embedding, [2, max_seq_len, head_dim / 2], fp32."""
    freqs = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(max_seq_len, dtype=torch.float32), freqs)
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Rotate each pair of channels (i, i + E/2) of x [B, S, H, E] by its position's angle, in fp32; return x's dtype."""
    cos, sin = rope[:, : x.shape[1], None, :]
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class CausalAttention(nn.Module):
    """Causal grouped-query attention: [B, S, D] -> [B, S, D]."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.head_dim = args.dim // args.num_heads
        self.wq = nn.Linear(args.dim, args.num_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(args.dim, args.num_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(args.dim, args.num_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(args.num_heads * self.head_dim, args.dim, bias=False)

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        """The head count is view(-1): under tensor parallelism the projections return this rank's heads only."""
        b, s, _ = x.shape
        q = rotate(self.wq(x).view(b, s, -1, self.head_dim), rope).transpose(1, 2)
        k = rotate(self.wk(x).view(b, s, -1, self.head_dim), rope).transpose(1, 2)
        v = self.wv(x).view(b, s, -1, self.head_dim).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(out.transpose(1, 2).reshape(b, s, -1))


class SwiGLU(nn.Module):
    """SwiGLU: w2(silu(w1 x) * w3 x), [B, S, D] -> [B, S, D] over F hidden channels."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.w1 = nn.Linear(args.dim, args.hidden_dim, bias=False)
        self.w2 = nn.Linear(args.hidden_dim, args.dim, bias=False)
        self.w3 = nn.Linear(args.dim, args.hidden_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TransformerBlock(nn.Module):
    """Pre-norm transformer block: attention, then feed-forward, each added to the residual stream."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.attention = CausalAttention(args)
        self.ffn_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.feed_forward = SwiGLU(args)

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rope)
        return x + self.feed_forward(self.ffn_norm(x))


class Transformer(nn.Module):
    """Tokens [B, S] -> logits [B, S, V]."""

    rope: Tensor

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.args = args
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        self.layers = nn.ModuleList(TransformerBlock(args) for _ in range(args.num_layers))
        self.norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.output = nn.Linear(args.dim, args.vocab_size, bias=False)
        table = rope_table(args.dim // args.num_heads, args.max_seq_len, args.rope_theta)
        self.register_buffer("rope", table, persistent=False)

    def init_weights(self, seed: int) -> None:
        """Draw all weights from `seed`, the same on every rank. Call it before the model is distributed."""
        generator = torch.Generator().manual_seed(seed)
        depth_std = 0.02 / (2 * self.args.num_layers) ** 0.5
        for name, weight in self.named_parameters():
            if weight.dim() == 1:
                nn.init.ones_(weight)
                continue
            std = depth_std if name.endswith(("wo.weight", "w2.weight")) else 0.02
            nn.init.normal_(weight, std=std, generator=generator)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, self.rope)
        return self.output(self.norm(x))

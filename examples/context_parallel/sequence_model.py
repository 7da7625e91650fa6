"""A small language model whose sequence is spread over ranks.

Legend: B sequences, S positions of this rank, R ranks, D width, H heads, E = D / H.

    gathered   keys and values of all ranks are gathered (all_gather; their gradients by reduce_scatter)
    ulysses    positions are exchanged for heads (all_to_all): each rank attends with H / R heads to the whole sequence
    whole      one rank has the whole sequence
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ub_overlap import _torch_compat as compat

FORMS = ("gathered", "ulysses")


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _exchange(x: Tensor) -> Tensor:
    """Send part i of dim 0 to rank i."""
    parts = [x.shape[0] // dist.get_world_size()] * dist.get_world_size()
    return compat.all_to_all_with_gradient(x.contiguous(), parts, parts, _world())


def to_heads(x: Tensor) -> Tensor:
    """[B, H, S, E] -> [B, H / R, R * S, E]."""
    ranks = dist.get_world_size()
    b, h, s, e = x.shape
    parts = _exchange(x.reshape(b, ranks, h // ranks, s, e).transpose(0, 1))
    return parts.permute(1, 2, 0, 3, 4).reshape(b, h // ranks, ranks * s, e)


def to_positions(x: Tensor) -> Tensor:
    """[B, H / R, R * S, E] -> [B, H, S, E]."""
    ranks = dist.get_world_size()
    b, h, s, e = x.shape
    parts = _exchange(x.reshape(b, h, ranks, s // ranks, e).permute(2, 0, 1, 3, 4))
    return parts.transpose(0, 1).reshape(b, ranks * h, s // ranks, e)


class SequenceAttention(nn.Module):
    """Causal attention, [B, S, D] -> [B, S, D]. `positions`: those of this rank in the whole sequence."""

    def __init__(self, width: int, heads: int, form: str) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.heads, self.form = heads, form

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = F.rms_norm(q, q.shape[-1:]), F.rms_norm(k, k.shape[-1:])
        if self.form == "gathered":
            k, v = (compat.all_gather_with_gradient(t.contiguous(), 2, _world()) for t in (k, v))
            seen = torch.arange(k.shape[2], device=x.device) <= positions[:, None]
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        elif self.form == "ulysses":
            q, k, v = (to_heads(t) for t in (q, k, v))
            out = to_positions(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        else:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).flatten(2))


class ByteFeedForward(nn.Module):
    """[B, S, D] -> [B, S, D]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.gelu(self.w1(x)))


class SequenceBlock(nn.Module):
    """Attention and feed-forward, each behind a norm and added to its input."""

    def __init__(self, width: int, heads: int, form: str) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(width), SequenceAttention(width, heads, form)
        self.ffn_norm, self.ffn = nn.RMSNorm(width), ByteFeedForward(width)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), positions)
        return x + self.ffn(self.ffn_norm(x))


class Model(nn.Module):
    """Bytes [B, S] at `positions` [S] -> logits [B, S, 256]."""

    def __init__(self, width: int, heads: int, layers: int, length: int, form: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(SequenceBlock(width, heads, form) for _ in range(layers))
        self.norm, self.output = nn.RMSNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(positions)
        for layer in self.layers:
            x = layer(x, positions)
        return self.output(self.norm(x))

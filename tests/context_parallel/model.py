"""Transformer blocks under context parallelism: each rank has a part of the sequence.

Legend: B batch, S positions of this rank, R ranks, H heads, D width. Queries [B, H, S, D/H] attend to keys and values of all
R * S positions, which the forms exchange in different ways:

    gathered   all_gather of k and of v (Megatron's and funcol's form)
    flex_op    torch's op for FlexAttention, cplib.flex_cp_allgather
    ulysses    all_to_all of q, k and v, and of the result: each rank attends with H / R heads
    sdpa       scaled_dot_product_attention alone: torch's context_parallel makes it a ring
    whole      the same as sdpa, on the whole sequence
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.experimental._context_parallel import flex_cp_allgather

from benchmarks.context_parallel.model import to_heads, to_positions


class Attention(nn.Module):
    """[B, S, D] -> the same."""

    def __init__(self, width: int, heads: int, form: str, is_causal: bool) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.heads, self.form, self.is_causal = heads, form, is_causal

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = F.rms_norm(q, q.shape[-1:]), F.rms_norm(k, k.shape[-1:])
        group = dist.group.WORLD
        assert group is not None
        if self.form == "gathered":
            k, v = (funcol.all_gather_tensor_autograd(t.contiguous(), 2, group) for t in (k, v))
        elif self.form == "flex_op":
            k, v = flex_cp_allgather(k, v, 2, group.group_name)
        elif self.form == "ulysses":
            q, k, v = (to_heads(t) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        if self.form == "ulysses":
            out = to_positions(out)
        return self.wo(out.transpose(1, 2).flatten(2))


class Net(nn.Module):
    """Blocks of a norm, an attention and a residual."""

    def __init__(self, form: str, is_causal: bool = False, layers: int = 2, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(Attention(width, heads, form, is_causal) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(F.rms_norm(x, x.shape[-1:]))
        return x

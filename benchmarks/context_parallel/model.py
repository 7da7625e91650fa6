"""Attention layers under context parallelism: each rank has a part of the sequence.

Legend: S positions of this rank, R ranks, D width, E head dim, H query heads, G key and value heads; batch 1.

    gathered   keys and values of all ranks are gathered
    ring       torch's ring attention: keys and values go from rank to rank, by one gather or by all_to_alls
    ulysses    positions are exchanged for heads: each rank attends with H / R heads to the whole sequence
    halves     the same in two halves of the heads: one half's exchanges are independent of the other half's attention
    local      no exchange: own keys and values, R times; the same attention, other numbers

Without a mask all ranks and all forms compute equally much. A causal mask is balanced: the sequence has 2R chunks, of which
rank r has chunks r and 2R - 1 - r (zigzag). Ulysses attends to the whole sequence, so its ranks have contiguous positions.
"gathered" brings keys and values in the order of their positions by a copy; "local" has no such copy, as its keys are any.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.bias import causal_lower_right

from ub_overlap.tools.planner.context_attention import to_heads, to_positions
from ub_overlap.tools.planner.ring_attention import parallelize_attention

from ..blocks.model import BlockSizes, linear

FORMS = ("gathered", "ring", "ulysses", "halves")
BY_HEADS = ("ulysses", "halves")
"""Forms that attend to the whole sequence. With causal masks their ranks have other positions than those of other forms."""
LOCAL = "local"


def _group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


class Sdpa(nn.Module):
    """scaled_dot_product_attention as a module, which the ring is applied to."""

    def __init__(self, is_causal: bool) -> None:
        super().__init__()
        self.is_causal = is_causal

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)


class ZigzagSdpa(nn.Module):
    """Causal attention of both chunks of a rank, [1, H, S, E], to all positions, [1, H, R * S, E]."""

    def __init__(self, mesh: DeviceMesh, positions: int, in_rank_order: bool) -> None:
        """`in_rank_order`: keys and values come as ranks hold them, and are put in the order of their positions."""
        super().__init__()
        rank, ranks, self.half = mesh.get_local_rank(), mesh.size(), positions // 2
        order = sorted(range(2 * ranks), key=lambda i: i // 2 if i % 2 == 0 else 2 * ranks - 1 - i // 2)
        self.order = order if in_rank_order else None
        seen = [(chunk + 1) * self.half for chunk in (rank, 2 * ranks - 1 - rank)]
        self.masks = [causal_lower_right(self.half, keys) for keys in seen]  # Dynamo does not trace their constructor

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.order is not None:
            k, v = (torch.cat([t.narrow(2, i * self.half, self.half) for i in self.order], 2) for t in (k, v))
        parts = [
            F.scaled_dot_product_attention(own, k[:, :, : mask.seq_len_kv], v[:, :, : mask.seq_len_kv], attn_mask=mask)
            for own, mask in zip(q.chunk(2, 2), self.masks, strict=True)
        ]
        return torch.cat(parts, 2)


class ContextAttention(nn.Module):
    """[1, S, D] -> the same."""

    def __init__(self, sizes: BlockSizes, form: str, mesh: DeviceMesh, positions: int, is_causal: bool) -> None:
        super().__init__()
        is_zigzag = is_causal and form in ("gathered", LOCAL)
        sdpa = ZigzagSdpa(mesh, positions, form == "gathered") if is_zigzag else Sdpa(is_causal)
        self.sdpa = parallelize_attention(sdpa, mesh) if form == "ring" else sdpa
        self.head_dim, kv_dim = sizes.head_dim, sizes.kv_heads * sizes.head_dim
        self.wq, self.wk, self.wv = linear(sizes.dim, sizes.dim), linear(sizes.dim, kv_dim), linear(sizes.dim, kv_dim)
        self.wo = linear(sizes.dim, sizes.dim)
        self.repeats, self.form = sizes.heads // sizes.kv_heads, form

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).view(1, x.shape[1], -1, self.head_dim).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        out = self.attend(q, k, v)
        return self.wo(out.transpose(1, 2).reshape(1, x.shape[1], -1))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.form == "gathered":
            k, v = (funcol.all_gather_tensor_autograd(t.contiguous(), 2, _group()) for t in (k, v))
        elif self.form in BY_HEADS:
            return self.attend_by_heads(q, k, v, 2 if self.form == "halves" else 1)
        elif self.form == LOCAL:
            k, v = (torch.cat([t] * dist.get_world_size(), 2) for t in (k, v))
        return self.attend_locally(q, k, v)

    def attend_by_heads(self, q: Tensor, k: Tensor, v: Tensor, parts: int) -> Tensor:
        """Exchange and attend with the heads in `parts`, all exchanges of q, k and v in front of the first attention."""
        chunks = zip(*(t.chunk(parts, 1) for t in (q, k, v)), strict=True)
        exchanged = [[to_heads(t, _group()) for t in chunk] for chunk in chunks]
        return torch.cat([to_positions(self.attend_locally(*part), _group()) for part in exchanged], 1)

    def attend_locally(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (t.repeat_interleave(self.repeats, 1) for t in (k, v))  # torch's ring knows no grouped heads
        return self.sdpa(q, k, v)


class ContextLayer(nn.Module):
    """Norm, attention, residual: [1, S, D] of this rank -> the same."""

    def __init__(self, sizes: BlockSizes, attention: nn.Module) -> None:
        super().__init__()
        self.norm, self.attention = nn.RMSNorm(sizes.dim), attention

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(self.norm(x))

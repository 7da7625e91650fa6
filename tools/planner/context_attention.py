"""Attention of a planned block whose sequence is spread over the ranks of context parallelism.

Legend: B batch, S positions of this rank, C ranks of context parallelism, H query heads of this rank, G key and value heads,
E width of a head.

    gathered   keys and values of all ranks are gathered
    ring       torch's ring attention, with one gather (its default) or with an all_to_all for each step
    ulysses    positions are exchanged for heads: each rank attends with H / C heads to the whole sequence

The mask is causal, and ranks are balanced: each computes half of what its queries and all keys would take.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import Graph

from ub_overlap import _torch_compat as compat
from ub_overlap.compiler.graph.attention import as_attention

from .ring_attention import parallelize_attention, ring_attention

ROTATIONS = {"ring": "allgather", "ring_all_to_all": "alltoall"}
"""Forms of the ring, and how torch calls them."""


def exchange(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send part i of dim 0 to rank i."""
    parts = [x.shape[0] // group.size()] * group.size()
    return compat.all_to_all_with_gradient(x.contiguous(), parts, parts, group)


def to_heads(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[B, H, S, E] -> [B, H / C, C * S, E]."""
    ranks, (b, h, s, e) = group.size(), x.shape
    parts = exchange(x.reshape(b, ranks, h // ranks, s, e).transpose(0, 1), group)
    return parts.permute(1, 2, 0, 3, 4).reshape(b, h // ranks, ranks * s, e)


def to_positions(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[B, H / C, C * S, E] -> [B, H, S, E]."""
    ranks, (b, h, s, e) = group.size(), x.shape
    parts = exchange(x.reshape(b, h, ranks, s // ranks, e).permute(2, 0, 1, 3, 4), group)
    return parts.transpose(0, 1).reshape(b, ranks * h, s // ranks, e)


class CausalSdpa(nn.Module):
    """scaled_dot_product_attention as a module: queries, keys and values -> the attended values."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class ContextParallelAttention(nn.Module):
    """[B, H, S, E], and twice [B, G, S, E] -> [B, H, S, E]. `form`: one of sizes.CP_FORMS; "" for a whole sequence."""

    def __init__(self, form: str = "", mesh: DeviceMesh | None = None) -> None:
        super().__init__()
        self.form, self.inner = form, CausalSdpa()
        if mesh is not None:
            self.group = mesh.get_group()
            if form in ROTATIONS:
                parallelize_attention(self.inner, mesh)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.form == "ulysses":
            k, v = (_repeat(t, self.group.size()) for t in (k, v))
            q, k, v = (to_heads(t, self.group) for t in (q, k, v))
        elif self.form == "gathered":
            k, v = (compat.all_gather_with_gradient(t.contiguous(), 2, self.group) for t in (k, v))
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) if t.shape[1] < q.shape[1] else t for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v) if self.form == "gathered" else self.inner(q, k, v)
        return to_positions(out, self.group) if self.form == "ulysses" else out


def _repeat(x: Tensor, ranks: int) -> Tensor:
    """Repeat heads where there are fewer than ranks that each need one."""
    return x if x.shape[1] % ranks == 0 else x.repeat_interleave(ranks, 1)


def use_form(blocks: nn.Module, form: str, mesh: DeviceMesh) -> None:
    """Give all attentions of `blocks` a form of context parallelism over `mesh`."""
    for module in list(blocks.modules()):
        if isinstance(getattr(module, "attend", None), ContextParallelAttention):
            module.attend = ContextParallelAttention(form, mesh)


def balance_attention(graph: Graph, form: str) -> None:
    """Note on the attentions of a graph that the causal mask leaves half of their operations, where their kernel has no mask.

    The words are those of torch.fx.traceback.annotate, which stays on for later graphs of the process (torch 2.13).
    """
    for node in graph.nodes:
        if form == "gathered" and as_attention(node) is not None:
            node.meta["custom"] = {**node.meta.get("custom", {}), "sparsity_hint": 0.5}


@contextlib.contextmanager
def context_of(form: str) -> Iterator[None]:
    """Trace a form inside of this context."""
    if form in ROTATIONS:
        with ring_attention(ROTATIONS[form], load_balance=True):
            yield
    else:
        yield

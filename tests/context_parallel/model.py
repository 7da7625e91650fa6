"""Transformer blocks under context parallelism: each rank has a part of the sequence.

Legend: B batch, S positions of this rank, R ranks, H heads, D width. Queries [B, H, S, D/H] attend to keys and values of all
R * S positions, which the forms exchange in different ways:

    gathered   all_gather of k and of v (Megatron's and funcol's form)
    flex_op    torch's op for FlexAttention, cplib.flex_cp_allgather
    flex       FlexAttention with torch's style for context parallelism
    whole_flex FlexAttention, on the whole sequence
    ulysses    all_to_all of q, k and v, and of the result: each rank attends with H / R heads
    sdpa       scaled_dot_product_attention alone: torch's context_parallel makes it a ring
    ring       the same as a module, with torch's style for context parallelism
    whole      the same as sdpa, on the whole sequence

With a mesh of "cp" and "tp", tensor parallelism (DTensor, sequence-parallel) divides the heads and the positions of each rank.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental._context_parallel._attention import _ContextParallel, flex_cp_allgather
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from ub_overlap.tools.planner.context_attention import to_heads, to_positions
from ub_overlap.tools.planner.ring_attention import parallelize_attention

GATHERED_INPUT = PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None))
TENSOR_PARALLEL: dict[str, ParallelStyle] = {
    **{name: ColwiseParallel() for name in ("wq", "wk", "wv")},
    "wo": RowwiseParallel(output_layouts=Shard(1)),
}


def flex_gradients_on_cpu() -> AbstractContextManager[object]:
    """Let FlexAttention train on the CPU inside of this context: it does with unfused ops, but refuses gradients."""
    return mock.patch.object(sys.modules[flex_attention.__module__], "_validate_device", _accept)


def _accept(*operands: Tensor) -> None:
    """Accept all operands. (Dynamo traces no mock.)"""


def norm(x: Tensor) -> Tensor:
    """Return the RMS norm, without `F.rms_norm`: on GPUs the gradient of that kernel has other strides than torch traces."""
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


class Flex(nn.Module):
    """FlexAttention as a module, which torch's style is applied to."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
        out = flex_attention(q, k, v, block_mask=mask)
        assert isinstance(out, Tensor)
        return out


class Sdpa(nn.Module):
    """scaled_dot_product_attention as a module, which torch's style is applied to."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)


class Attention(nn.Module):
    """[B, S, D] -> the same."""

    def __init__(self, width: int, heads: int, form: str, is_causal: bool, mesh: DeviceMesh | None, kv_heads: int = 0) -> None:
        """`kv_heads`: heads of keys and values, which are repeated for those of queries; 0: as many."""
        super().__init__()
        self.repeats = heads // (kv_heads or heads)
        self.wq, self.wo = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.wk, self.wv = (nn.Linear(width, width // self.repeats, bias=False) for _ in range(2))
        self.head_dim, self.form, self.is_causal = width // heads, form, is_causal
        self.group = mesh.get_group("cp") if mesh is not None else dist.group.WORLD
        self.flex, self.sdpa = Flex(), Sdpa()
        if form == "ring":
            assert mesh is not None
            parallelize_attention(self.sdpa, mesh["cp"])
        if form == "flex":
            assert mesh is not None
            _ContextParallel(2, _ContextParallel.AttentionType.FLEX)._apply(self.flex, mesh["cp"])

    def forward(self, x: Tensor, mask: BlockMask | None = None) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = norm(q), norm(k)
        if self.repeats > 1:
            k, v = (t.repeat_interleave(self.repeats, 1) for t in (k, v))
        if self.form.endswith("flex"):
            return self.wo(self.flex(q, k, v, mask).transpose(1, 2).flatten(2))
        group = self.group
        assert group is not None
        if self.form == "gathered":
            k, v = (funcol.all_gather_tensor_autograd(t.contiguous(), 2, group) for t in (k, v))
        elif self.form == "flex_op":
            k, v = flex_cp_allgather(k, v, 2, group.group_name)
        elif self.form == "ulysses":
            q, k, v = (to_heads(t, group) for t in (q, k, v))
        out = self.sdpa(q, k, v, self.is_causal)
        if self.form == "ulysses":
            out = to_positions(out, group)
        return self.wo(out.transpose(1, 2).flatten(2))


class Net(nn.Module):
    """Blocks of a norm, an attention and a residual."""

    def __init__(
        self,
        form: str,
        is_causal: bool = False,
        layers: int = 2,
        width: int = 64,
        heads: int = 4,
        mesh: DeviceMesh | None = None,
        kv_heads: int = 0,
    ) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(Attention(width, heads, form, is_causal, mesh, kv_heads) for _ in range(layers))
        if mesh is not None and "tp" in (mesh.mesh_dim_names or ()):
            for layer in self.layers:
                parallelize_module(layer, mesh["tp"], GATHERED_INPUT)
                parallelize_module(layer, mesh["tp"], TENSOR_PARALLEL)

    def forward(self, x: Tensor, mask: BlockMask | None = None) -> Tensor:
        for layer in self.layers:
            x = x + layer(norm(x), mask)
        return x

"""Decoder blocks as DTensor users write them: tensor and sequence parallelism, and weights sharded over data-parallel ranks.

Legend: R ranks of tensor parallelism, B batch, S sequence (S/R per rank between the parallel regions), D hidden, H query heads,
d width of a head. With context parallelism S is the share of its rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from ub_overlap import _torch_compat as compat

from .context_attention import ContextParallelAttention, use_form
from .experts import PlannedExperts
from .sizes import PlannedBlock

gather_weight = compat.all_gather_with_gradient
TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Attention(nn.Module):
    """[B, S, D] -> [B, S, D], causal."""

    def __init__(self, s: PlannedBlock) -> None:
        super().__init__()
        few, bias = s.kv_heads * s.head_dim, not s.gated
        self.head_dim, self.rotary = s.head_dim, s.gated
        self.wq, self.wk, self.wv = (nn.Linear(s.hidden, n, bias=bias) for n in (s.hidden, few, few))
        self.wo = nn.Linear(s.hidden, s.hidden, bias=bias)
        self.attend = ContextParallelAttention()

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (w(x).view(batch, length, -1, self.head_dim).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        if self.rotary:
            q, k = rotate(q), rotate(k)
        out = self.attend(q, k, v)
        return self.wo(out.transpose(1, 2).reshape(batch, length, -1))


def rotate(x: Tensor) -> Tensor:
    """Apply rotary positions, halves form. [B, H, S, d] -> the same."""
    half = x.shape[-1] // 2
    frequency = 10000.0 ** (-torch.arange(half, dtype=torch.float32, device=x.device) / half)
    angle = torch.arange(x.shape[-2], dtype=torch.float32, device=x.device)[:, None] * frequency
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class FeedForward(nn.Module):
    """[B, S, D] -> [B, S, D]."""

    def __init__(self, s: PlannedBlock) -> None:
        super().__init__()
        self.w1 = nn.Linear(s.hidden, s.dense_ffn, bias=not s.gated)
        self.w2 = nn.Linear(s.dense_ffn, s.hidden, bias=not s.gated)
        self.w3 = nn.Linear(s.hidden, s.dense_ffn, bias=False) if s.gated else None

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x) if self.w3 is not None else F.gelu(self.w1(x), approximate="tanh"))


def feed_forward(s: PlannedBlock, expert_mesh: DeviceMesh | None) -> nn.Module:
    """Return a dense layer, or experts."""
    dense = FeedForward(s) if s.dense_ffn else None
    if s.experts > 1:
        return PlannedExperts(s, expert_mesh, dense)
    assert dense is not None
    return dense


class Block(nn.Module):
    """[B, S/R, D] of this rank -> the same."""

    def __init__(self, s: PlannedBlock, expert_mesh: DeviceMesh | None) -> None:
        super().__init__()
        norm = nn.RMSNorm if s.gated else nn.LayerNorm
        self.attention_norm, self.attention = norm(s.hidden, eps=1e-5), Attention(s)
        self.ffn_norm, self.feed_forward = norm(s.hidden, eps=1e-5), feed_forward(s, expert_mesh)

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x))
        return h + self.feed_forward(self.ffn_norm(h))


class Blocks(nn.Module):
    """`layers` blocks, one after the other."""

    def __init__(self, s: PlannedBlock, expert_mesh: DeviceMesh | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(s, expert_mesh) for _ in range(s.layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class _SummedGradient(torch.autograd.Function):
    """A whole weight whose gradient is summed over its replicas, in front of the reduce_scatter, as DTensor does."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, replicas: str) -> Tensor:
        ctx.replicas = replicas
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        c10d = torch.ops._c10d_functional
        return c10d.wait_tensor(c10d.all_reduce(gradients[0], "sum", ctx.replicas)), None


class ShardedParameter(nn.Module):
    """This rank's share of the rows of a parameter. It gathers the others where the parameter is used (ZeRO-3).

    `replicas`: the name of the group of the ranks with the same share, if there are several (hybrid sharding).
    """

    def __init__(self, whole: Any, ranks: int, group: Any, replicas: str | None = None) -> None:
        super().__init__()
        self.shard = nn.Parameter(_local(whole).detach().chunk(group.size())[group.rank()].clone())
        self._group, self._replicas = group, replicas
        self._mesh, self._placements = (whole.device_mesh, whole.placements) if isinstance(whole, DTensor) else (None, ())

    def forward(self) -> Any:
        whole: Any = gather_weight(self.shard, 0, self._group)
        if self._replicas is not None:
            whole = _SummedGradient.apply(whole, self._replicas)
        return whole if self._mesh is None else DTensor.from_local(whole, self._mesh, self._placements, run_check=False)


class ShardedLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, *_parameters(self))


class ShardedRMSNorm(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, *_parameters(self)[:1], eps=self.eps)


class ShardedLayerNorm(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        return F.layer_norm(input, self.normalized_shape, *_parameters(self), self.eps)


_SHARDED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: ShardedLinear, nn.RMSNorm: ShardedRMSNorm, nn.LayerNorm: ShardedLayerNorm,
}  # fmt: skip


def _parameters(module: nn.Module) -> tuple[Any, Any]:
    """Return the whole weight and bias of a sharded module; None for a bias that it does not have."""
    sharded = (getattr(module, f"sharded_{own}", None) for own in ("weight", "bias"))
    weight, bias = (own() if own is not None else None for own in sharded)
    return weight, bias if bias is not None else getattr(module, "bias", None)


def shard_parameters(module: nn.Module, ranks: int, group: Any, replicas: str | None = None) -> None:
    """Shard the weights and biases of all linears and norms over `ranks`. Routers, and biases of fewer elements, stay whole.

    `replicas`: as of ShardedParameter.
    """
    for name, child in list(module.named_modules()):
        if type(child) in _SHARDED and not name.endswith("router"):
            for own in ("weight", "bias"):
                whole = getattr(child, own, None)
                if whole is not None and (own == "weight" or _local(whole).shape[0] % ranks == 0):
                    setattr(child, f"sharded_{own}", ShardedParameter(whole, ranks, group, replicas))
                    delattr(child, own)
            child.__class__ = _SHARDED[type(child)]


def _local(parameter: Any) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Let new tensors have `dtype` by default: a fake module cannot be cast afterwards."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def parallel_blocks(s: PlannedBlock, mesh: DeviceMesh, expert_mesh: DeviceMesh | None = None) -> nn.Module:
    """Return the blocks over `mesh`, whose dims are "dp", "cp" and "tp"; one of one rank is not there.

    `expert_mesh`: of the same ranks. Its dims are "replicas", of ranks with the same experts, and "ep".

    Tensor parallelism: DTensors, sequence-parallel norms, column- then row-parallel layers. Data parallelism shards weights
    over the ranks of context parallelism too.
    """
    with default_dtype(TORCH_DTYPES[s.dtype]):
        blocks = Blocks(s, expert_mesh)
    if s.tp > 1:
        _parallelize(blocks, s, mesh["tp"])
    if s.cp > 1:
        use_form(blocks, s.cp_form, mesh["cp"])
    if s.dp > 1:
        with compat.unset_fake_temporarily():  # a mesh computes with its ranks
            sharding = mesh["dp", "cp"]._flatten("dp_cp") if s.cp > 1 else mesh["dp"]
        shard_parameters(blocks, s.weight_ranks, sharding.get_group())
    return blocks


def _parallelize(blocks: Blocks, s: PlannedBlock, mesh: DeviceMesh) -> None:
    gather_input = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    plan: dict[str, ParallelStyle] = {"attention_norm": SequenceParallel(), "ffn_norm": SequenceParallel()}
    column, row = [f"attention.{name}" for name in ("wq", "wk", "wv")], ["attention.wo"]
    plan["attention"] = gather_input
    if s.experts > 1:  # each rank routes the tokens of its sequence shard
        plan["feed_forward"] = PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Shard(1),), use_local_output=True
        )
    if s.dense_ffn:
        dense = "feed_forward.shared" if s.experts > 1 else "feed_forward"
        plan[dense] = gather_input
        column += [f"{dense}.{name}" for name in (("w1", "w3") if s.gated else ("w1",))]
        row += [f"{dense}.w2"]
    plan |= {name: ColwiseParallel() for name in column}
    plan |= {name: RowwiseParallel(output_layouts=Shard(1)) for name in row}
    for block in blocks.layers:
        parallelize_module(block, mesh, plan)


def block_input(s: PlannedBlock) -> Tensor:
    """Return this rank's shard of the hidden states, [B, S/R, D], which requires grad."""
    return torch.zeros(s.batch, s.seq // (s.cp * s.tp), s.hidden, dtype=TORCH_DTYPES[s.dtype], requires_grad=True)

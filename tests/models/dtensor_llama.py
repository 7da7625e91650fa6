"""Llama in the form of torchtitan's, parallelised with DTensor: sequence-parallel, all_reduce, 2D mesh, language-model head.

Legend: B batch, S sequence (S/R per rank between blocks), D width, H query heads, G key/value heads, F feed-forward width,
V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from tests.models.case import Case, Expected, Sites, device, noise, settle


@dataclass(frozen=True)
class Config:
    """Model sizes; every sharded dim is divisible by 8."""

    layers: int = 1
    dim: int = 64
    heads: int = 8
    kv_heads: int = 8
    hidden: int = 96
    vocab: int = 160
    bias: bool = False


class Attention(nn.Module):
    """Causal attention with grouped query heads and rotary positions. [B, S, D] -> [B, S, D]."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_dim = config.dim // config.heads
        self.wq = nn.Linear(config.dim, config.heads * self.head_dim, bias=config.bias)
        self.wk = nn.Linear(config.dim, config.kv_heads * self.head_dim, bias=config.bias)
        self.wv = nn.Linear(config.dim, config.kv_heads * self.head_dim, bias=config.bias)
        self.wo = nn.Linear(config.heads * self.head_dim, config.dim, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (w(x).view(batch, length, -1, self.head_dim).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(q), rotate(k)
        repeat = q.shape[1] // k.shape[1]
        if repeat > 1:
            k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(batch, length, -1))


def rotate(x: Tensor) -> Tensor:
    """Apply rotary positions in the half-split form. [B, H, S, d] -> the same."""
    half, length = x.shape[-1] // 2, x.shape[-2]
    frequency = 10000.0 ** (-torch.arange(half, dtype=torch.float32, device=x.device) / half)
    angle = torch.arange(length, dtype=torch.float32, device=x.device)[:, None] * frequency
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class FeedForward(nn.Module):
    """SwiGLU. [B, S, D] -> [B, S, D]."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.hidden, bias=config.bias)
        self.w2 = nn.Linear(config.hidden, config.dim, bias=config.bias)
        self.w3 = nn.Linear(config.dim, config.hidden, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.feed_forward = FeedForward(config)
        self.attention_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=1e-5)

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x))
        return h + self.feed_forward(self.ffn_norm(h))


class ShardBlocks(nn.Module):
    """Decoder layers without embedding and head: hidden states in, hidden states out."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Llama(nn.Module):
    """Tokens [B, S] -> logits [B, S, V]."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(config.vocab, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.output = nn.Linear(config.dim, config.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            h = layer(h)
        return self.output(self.norm(h))


class WithLoss(nn.Module):
    """Mean cross entropy of `model(tokens)` against `labels`, inside the compiled region."""

    def __init__(self, model: nn.Module, sharded: bool) -> None:
        super().__init__()
        self.model = model
        self.sharded = sharded

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        logits = self.model(tokens)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(0, 1))


def sequence_plan() -> dict[str, Any]:
    """Return the sequence-parallel plan of one block: hidden states are Shard(1) between the linears."""
    return {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "ffn_norm": SequenceParallel(),
        "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w3": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
    }


def each_plan() -> dict[str, Any]:
    """Return the sequence-parallel plan in which every column-wise linear gathers its own input, as in torch's tutorials."""
    plan = {name: style for name, style in sequence_plan().items() if not isinstance(style, PrepareModuleInput)}
    columns = ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3")
    return plan | {name: ColwiseParallel(input_layouts=Shard(1)) for name in columns}


def reduce_plan() -> dict[str, Any]:
    """Return the tensor-parallel plan of one block: hidden states are replicated, row-wise linears all_reduce."""
    column, row = (
        ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3"),
        ("attention.wo", "feed_forward.w2"),
    )
    return {**{name: ColwiseParallel() for name in column}, **{name: RowwiseParallel() for name in row}}


def tensor_mesh(world: int, two_dims: bool) -> DeviceMesh:
    """Return the mesh of all ranks.

    With `two_dims`, 4 ranks have tensor parallelism over {0, 2} and {1, 3}, and data parallelism over the other dim.
    """
    if not two_dims:
        return DeviceMesh(device().type, torch.arange(world), mesh_dim_names=("tp",))
    grid = torch.arange(world).view(-1, 2).t().contiguous() if world == 4 else torch.arange(world).view(1, -1)
    return DeviceMesh(device().type, grid, mesh_dim_names=("dp", "tp"))["tp"]


def blocks_sites(layers: int, sequence: bool, needs_input_grad: bool = True, each: bool = False) -> Expected:
    """Return the sites of `layers` blocks.

    Sequence-parallel forward: norm -> gather -> q k v; wo -> scatter; norm -> gather -> w1 w3; w2 -> scatter. Backward: each
    scatter's gradient is gathered and feeds input and weight gradient (contracted) of wo and w2; each gather's gradient is the
    sum of the input gradients of q k v (w1 w3), scattered. Plain forward: wo, w2 -> all_reduce. Plain backward: one all_reduce
    per column-wise linear (3 + 2), of which those with summed results merge into one (1 + 1). `each`: the same for gathers of
    one tensor in the forward, and for reduce_scatters in the backward.
    """
    if sequence:
        more = 3 * layers if each else 0
        return Expected(
            Sites(gather=2 * layers, scatter=2 * layers, merged_gathers=more),
            Sites(gather=2 * layers, scatter=2 * layers, contracted=2 * layers, merged_scatters=more),
        )
    last = 0 if needs_input_grad else 1
    return Expected(Sites(reduce=2 * layers), Sites(reduce=2 * layers - last, merged=3 * layers - 2 * last))


def build(
    rank: int,
    world: int,
    sequence: bool = True,
    each: bool = False,
    batch: int = 2,
    layers: int = 1,
    bias: bool = False,
    kv_heads: int = 8,
    head: str = "",
    two_dims: bool = False,
    length: int = 16,
    dtype: torch.dtype = torch.float32,
    exact: bool = False,
    dynamic: bool | None = None,
) -> Case:
    """Build blocks or the whole model.

    `each`: every column-wise linear gathers its own input. `head`: "" (blocks on hidden states), "logits", "loss" or
    "loss_parallel" (whole model on tokens). `length`: global S.
    """
    config = Config(layers=layers, bias=bias, kv_heads=kv_heads)
    mesh = tensor_mesh(world, two_dims)
    ranks, me = mesh.size(), mesh.get_local_rank()
    torch.manual_seed(7)
    plan = each_plan() if each else sequence_plan() if sequence else reduce_plan()
    if not head:
        blocks = settle(ShardBlocks(config), dtype, exact)
        x = noise((batch, length, config.dim), 11, dtype, exact, grad=False)
        for block in blocks.layers:
            parallelize_module(block, mesh, plan)
        local = x.tensor_split(ranks, 1)[me].clone() if sequence else x
        return Case(blocks, (local.requires_grad_(),), blocks_sites(layers, sequence, each=each), dynamic=dynamic)
    model = settle(Llama(config), dtype, exact)
    for block in model.layers:
        parallelize_module(block, mesh, plan)
    sharded = head == "loss_parallel"
    between = Shard(1) if sequence else Replicate()
    outer: dict[str, Any] = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "output": ColwiseParallel(
            input_layouts=between, output_layouts=Shard(-1) if sharded else Replicate(), use_local_output=not sharded
        ),
    }
    if sequence:
        outer["norm"] = SequenceParallel()
    parallelize_module(model, mesh, outer)
    generator = torch.Generator().manual_seed(11)
    tokens, labels = torch.randint(config.vocab, (2, batch, length), generator=generator).to(device()).unbind(0)
    expected = head_sites(layers, sequence, sharded)
    if head == "logits":
        return Case(model, (tokens,), expected, dynamic=dynamic)
    return Case(
        WithLoss(model, sharded), (tokens, labels), expected, dynamic=dynamic, context=loss_parallel if sharded else None
    )


def head_sites(layers: int, sequence: bool, sharded: bool) -> Expected:
    """Return the sites of the blocks, the embedding (a sum over ranks without a matmul) and the head (a column-wise linear).

    Unsharded logits are gathered after the head's matmul (plain); a sharded loss has three small all_reduces instead.
    """
    inner = blocks_sites(layers, sequence)
    logits_gather, loss_reduces = (0, 3) if sharded else (1, 0)
    if sequence:
        f = Sites(
            gather=inner.forward.gather + 1,
            scatter=inner.forward.scatter,
            plain_scatter=1,
            plain_gather=logits_gather,
            plain_reduce=loss_reduces,
        )
        b = Sites(
            gather=inner.backward.gather,
            scatter=inner.backward.scatter + 1,
            contracted=inner.backward.contracted,
            plain_gather=1,
        )
    else:
        f = Sites(reduce=inner.forward.reduce, plain_reduce=1 + loss_reduces, plain_gather=logits_gather)
        b = Sites(reduce=inner.backward.reduce + 1, merged=inner.backward.merged)
    return Expected(f, b)

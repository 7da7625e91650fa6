"""Variants of attention layers under context parallelism: SYSTEM_FORM, with the forms of model.py.

    eager        torch.compile is not used; collectives of NCCL (gloo on the CPU)
    inductor     torch.compile with its default backend (aot_eager on the CPU)
    ours, ...    our backend, with the options of that name
    te_COMM      TransformerEngine's attention with cp_comm_type COMM, where it is installed: p2p, all_gather, a2a. Only its
                 norms are compiled
    compute      no exchange, compiled by Inductor

The ring has the rotation of --rotation; ring.py has it on the CPU too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from ub_overlap.tools.rank_process import World

from ..blocks.model import BlockSizes, fresh_code, linear
from ..parallel.variant import COMPUTE, EAGER, INDUCTOR, ParallelVariant, backend
from .model import LOCAL, ContextAttention, ContextLayer

TRANSFORMER_ENGINE = ("te_p2p", "te_all_gather", "te_a2a")


@dataclass
class AttentionContext:
    """What all variants share. `tokens`: of the whole sequence. `compiler`: "inductor" or "aot_eager"."""

    world: World
    sizes: BlockSizes
    tokens: int
    layers: int
    dtype: torch.dtype
    is_causal: bool
    compiler: str
    ours: dict[str, dict[str, Any]]


def split_name(name: str) -> tuple[str, str]:
    """Return (system, form) of a variant."""
    if name == COMPUTE:
        return INDUCTOR, LOCAL
    system, _, form = name.rpartition("_")
    return system, form


def names_of(systems: list[str], forms: list[str]) -> list[str]:
    """Return the variants of these systems in these forms. TransformerEngine has forms of its own."""
    return [name for system in systems for name in ([system] if system in (COMPUTE, *TRANSFORMER_ENGINE) else
            [f"{system}_{form}" for form in forms])]  # fmt: skip


def make(name: str, context: AttentionContext) -> ParallelVariant:
    """Return a variant that has run one step."""
    world = context.world
    system, form = split_name(name)
    is_te = name in TRANSFORMER_ENGINE
    stream = torch.cuda.Stream() if is_te else None
    mesh = init_device_mesh(world.device.type, (world.ranks,))
    torch.manual_seed(1)
    with torch.device(world.device):
        attentions = [
            TransformerEngineAttention(context.sizes, name.removeprefix("te_"), world, context.is_causal, stream)
            if stream is not None
            else ContextAttention(context.sizes, form, mesh, context.tokens // world.ranks, context.is_causal)
            for _ in range(context.layers)
        ]
        layers = [ContextLayer(context.sizes, attention).to(context.dtype) for attention in attentions]
    for layer in layers if is_te else ():
        layer.norm.compile()
    model: nn.Module = fresh_code(nn.Sequential(*layers))
    is_eager = is_te or system == EAGER
    arguments = {} if is_eager else backend(system, context.compiler, context.ours)
    call: Any = model if is_eager else torch.compile(model, fullgraph=True, **arguments)
    shape = (1, context.tokens // world.ranks, context.sizes.dim)
    torch.manual_seed(100 + world.rank)
    x, grad = (torch.randn(shape, device=world.device, dtype=context.dtype) for _ in range(2))
    return ParallelVariant(name, model, call, x.requires_grad_(), grad).first_step(world)


class TransformerEngineAttention(nn.Module):
    """[1, S, D] -> the same, with the exchange inside transformer_engine.pytorch.DotProductAttention."""

    def __init__(self, sizes: BlockSizes, comm: str, world: World, is_causal: bool, stream: torch.cuda.Stream) -> None:
        """`stream`: of the exchanges of all layers. ImportError where TransformerEngine is not installed."""
        super().__init__()
        import transformer_engine.pytorch as te  # optional

        self.head_dim, kv_dim = sizes.head_dim, sizes.kv_heads * sizes.head_dim
        self.wq, self.wk, self.wv = linear(sizes.dim, sizes.dim), linear(sizes.dim, kv_dim), linear(sizes.dim, kv_dim)
        self.wo = linear(sizes.dim, sizes.dim)
        self.attention = te.DotProductAttention(
            sizes.heads, sizes.head_dim, num_gqa_groups=sizes.kv_heads, attention_dropout=0.0, qkv_format="bshd",
            attn_mask_type="causal" if is_causal else "no_mask",
        )  # fmt: skip
        self.attention.set_context_parallel_group(dist.group.WORLD, list(range(world.ranks)), stream, comm)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).view(1, x.shape[1], -1, self.head_dim) for w in (self.wq, self.wk, self.wv))
        return self.wo(self.attention(q, k, v).view(1, x.shape[1], -1))

"""Variants of layers with experts.

compute      no exchange: the experts of a rank get the rows of its own tokens; compiled by Inductor
eager        torch.compile is not used; collectives of NCCL (gloo on the CPU)
inductor     torch.compile with its default backend (aot_eager on the CPU)
vdev         torch's torch.ops.symm_mem.all_to_all_vdev for rows, eager; sizes stay on the device (symmetric_memory.py)
ours, ...    our backend, with the options of that name
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ub_overlap
from ub_overlap.tools.rank_process import World

from ..blocks.model import fresh_code
from ..parallel.variant import COMPUTE, EAGER, ParallelVariant, backend
from .model import CheckpointedLayer, ExpertLayer, ExpertSizes, make_routes
from .symmetric_memory import use_symmetric_memory

SYMMETRIC = "vdev"


@dataclass
class ExpertContext:
    """What all variants share. `own`: experts of a rank. `compiler`: "inductor" or "aot_eager".

    `is_checkpointed`: backward computes each layer again.
    """

    world: World
    sizes: ExpertSizes
    tokens: int
    layers: int
    own: int
    routing: str
    has_shared: bool
    is_checkpointed: bool
    compiler: str
    ours: dict[str, dict[str, Any]]


def make(name: str, context: ExpertContext) -> ParallelVariant:
    """Return a variant that has run one step."""
    world, sizes = context.world, context.sizes
    group = None if name == COMPUTE else dist.group.WORLD
    top = min(sizes.top, context.own * world.ranks)
    torch.manual_seed(1 + world.rank)
    layers = []
    for _ in range(context.layers):
        routes = make_routes(context.tokens, context.own * world.ranks, top, context.routing, world.rank)
        with torch.device(world.device):
            layers.append(ExpertLayer(sizes, context.own, routes, group, context.has_shared))
        if group is not None:
            ub_overlap.tokenwise(layers[-1].block, arguments=3)  # for ours: other systems compute them whole
    modules = [CheckpointedLayer(layer) for layer in layers] if context.is_checkpointed else layers
    model: nn.Module = fresh_code(nn.Sequential(*modules)).to(world.device, torch.bfloat16)
    if name == SYMMETRIC:
        use_symmetric_memory(model, context.tokens * top * world.ranks)
    is_eager = name in (EAGER, SYMMETRIC)
    call: Any = model if is_eager else torch.compile(model, fullgraph=True, **backend(name, context.compiler, context.ours))
    torch.manual_seed(100 + world.rank)
    x, grad = (torch.randn((context.tokens, sizes.dim), device=world.device, dtype=torch.bfloat16) for _ in range(2))
    return ParallelVariant(name, model, call, x.requires_grad_(), grad).first_step(world)

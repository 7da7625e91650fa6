"""Variants of Llama blocks under data parallelism: FSDP2, DDP, gathers in the graph, and the compute of one rank alone.

    compute            whole weights, no communication
    inductor           every linear and norm gathers its weight in the graph (ZeRO-3 by functional collectives), torch.compile
    inductor_overlap   the same with Inductor's overlap scheduling and bucketing
    inductor_symm      the same, with its low-contention collectives too (symmetric memory), where torch has them. It replaces
                       only collectives of at least 16 MiB per rank that a matmul can hide; without any there are no times
    fsdp2              fully_shard of each block and of the model, each block compiled
    fsdp2_ours         the same with ub_overlap.fsdp.install
    fsdp2_symm         the same with set_symm_mem_for_comm, where torch has it; not in one run with ours, whose memory it breaks
    ddp                DistributedDataParallel around the model, each block compiled
    ddp_ours           the same with ub_overlap.ddp.install
    step               the whole step of inductor, traced as one graph by make_fx and compiled by Inductor
    step_ours          the same, with ub_overlap.apply_passes in front of Inductor, and the options of "ours"
    others             as inductor, by our backend with the options of that name

Weights are sharded by rows; those of DDP are whole. All ranks have the same weights and inputs of their own.

With replicas (hybrid sharding) weights are sharded over the ranks of "dp" and equal over those of "replicas", which sum their
gradients: in the graph in front of the reduce_scatter, as DTensor does, in FSDP2 behind it.

With tensor parallelism a weight is the part of its rank of "tp", and sharded over the ranks of "dp". compute then has views in
place of the collectives of both.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

import ub_overlap
from ub_overlap.compiler.reports.history import HISTORY
from ub_overlap.runtime import verify
from ub_overlap.runtime.site_id import SiteId
from ub_overlap.tools.planner.models import shard_parameters
from ub_overlap.tools.rank_process import World

from ..blocks.model import BlockSizes, LlamaBlock, compute_only, fresh_code, parallel_block
from ..parallel.variant import COMPUTE, INDUCTOR, ParallelVariant, backend
from .inductor_options import INDUCTOR_RIVALS, INDUCTOR_SYMM, count_grouped_heads, count_low_contention, inductor_options
from .traced_step import TracedStep

FSDP2, FSDP2_OURS, FSDP2_SYMM = "fsdp2", "fsdp2_ours", "fsdp2_symm"
TORCH = (COMPUTE, INDUCTOR, FSDP2)
SHARDED = (FSDP2, FSDP2_OURS, FSDP2_SYMM)
"""Variants that use fully_shard."""
DDP, DDP_OURS = "ddp", "ddp_ours"
HOOKED = (*SHARDED, DDP, DDP_OURS)
"""Variants that communicate in hooks, outside of the graphs."""
STEPS = ("step", "step_ours")
"""Variants whose step is one graph."""
RIVALS = (*INDUCTOR_RIVALS, FSDP2_OURS, FSDP2_SYMM, DDP, DDP_OURS, *STEPS)
"""Variants next to those of TORCH, of ours by options, that have names of their own."""


@dataclass
class ParallelContext:
    """What all variants share. `compiler`: "inductor" or "aot_eager". `ours`: name -> options of our backend.

    `mesh`: of "replicas", "dp" and "tp". `tokens`: of each sequence, which the ranks of "tp" share.
    """

    world: World
    mesh: DeviceMesh
    sizes: BlockSizes
    tokens: int
    layers: int
    dtype: torch.dtype
    compiler: str
    ours: dict[str, dict[str, Any]]


def make(name: str, context: ParallelContext) -> ParallelVariant:
    """Return a variant that has run one step."""
    world = context.world
    model = _model(name, context)
    call: Any = model
    arguments = backend(name, context.compiler, context.ours)
    if name in INDUCTOR_RIVALS:
        arguments = {"options": inductor_options(name, context.compiler, world.cuda)}
        count_grouped_heads()
    if name in HOOKED:
        for block in model.children():
            block.compile(**arguments)
        call = _with_hooks(model, name, context.mesh)
    else:
        if name != COMPUTE:
            replicas = context.mesh["replicas"]
            others = replicas.get_group().group_name if replicas.size() > 1 else None
            shard_parameters(model, context.mesh["dp"].size(), context.mesh["dp"].get_group(), others)
        call = torch.compile(model, fullgraph=True, **arguments)
    torch.manual_seed(100 + world.rank)
    shape = (1, context.tokens // context.mesh["tp"].size(), context.sizes.dim)
    x, grad = (torch.randn(shape, device=world.device, dtype=context.dtype) for _ in range(2))
    settings = arguments["options"] if name in INDUCTOR_RIVALS else {}
    if name in STEPS:
        options = context.ours.get("ours", {})
        return TracedStep.of(name, model, x, grad, context.compiler, options).first_step(world)
    variant = ParallelVariant(name, model, call, x.requires_grad_(), grad, settings=settings).first_step(world)
    if name == INDUCTOR_SYMM:
        variant.sites = f"{count_low_contention(variant.step)} low-contention"
    return variant


def _model(name: str, context: ParallelContext) -> nn.Module:
    """Return the layers, whose weights are whole over the ranks of "dp". All ranks draw the same ones."""
    sizes, device, dtype, tp = context.sizes, context.world.device, context.dtype, context.mesh["tp"]
    torch.manual_seed(1)
    if tp.size() > 1 and name == COMPUTE:
        return compute_only(sizes, tp.size(), context.tokens, device, dtype, context.layers)
    if tp.size() > 1:
        blocks = [parallel_block(sizes, tp, device, dtype) for _ in range(context.layers)]
    else:
        with torch.device(device):
            blocks = [LlamaBlock(sizes).to(dtype) for _ in range(context.layers)]
    return fresh_code(nn.Sequential(*blocks))


def _with_hooks(model: nn.Module, name: str, mesh: DeviceMesh) -> nn.Module:
    """Let FSDP2 or DDP communicate for `model`, whose blocks are compiled. Return what is called."""
    if name in (DDP, DDP_OURS):
        replicated = DistributedDataParallel(model)
        if name == DDP_OURS:
            ub_overlap.ddp.install(replicated)
        return replicated
    mesh = mesh["replicas", "dp"] if mesh["replicas"].size() > 1 else mesh["dp"]
    for block in model.children():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if name == FSDP2_OURS:
        ub_overlap.fsdp.install(model)
    if name == FSDP2_SYMM:
        if os.environ.get("NCCL_NVLS_ENABLE") != "0":
            raise RuntimeError("NCCL_NVLS_ENABLE=0 must be set: NCCL's symmetric memory uses multicast otherwise")
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_symm_mem_for_comm()
    return model


def site_errors(variant: ParallelVariant) -> dict[str, float]:
    """Return by kind and strategy the largest error of a site, for options with "verify". Gathers have none: 0."""
    measured = verify.ERRORS.by_site()
    errors: dict[str, float] = {}
    for plan in HISTORY.since(0):
        for d in plan.decisions if plan.digest in variant.digests else ():
            found = measured.get(str(SiteId(plan.digest, d.id)))
            if found is not None:
                key = f"{d.kind.value} {d.strategy}"
                errors[key] = max(errors.get(key, 0.0), found.error)
    return errors

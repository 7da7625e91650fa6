"""Variants of Llama blocks under data parallelism: FSDP2, DDP, gathers in the graph, and the compute of one rank alone.

    compute            whole weights, no communication
    inductor           every linear and norm gathers its weight in the graph (ZeRO-3 by functional collectives), torch.compile
    inductor_overlap   the same with Inductor's overlap scheduling
    inductor_symm      the same, with its low-contention collectives too (symmetric memory), where torch has them
    fsdp2              fully_shard of each block and of the model, each block compiled
    fsdp2_ours         the same with ub_overlap.fsdp.install
    fsdp2_symm         the same with set_symm_mem_for_comm, where torch has it; not in one run with ours, whose memory it breaks
    ddp                DistributedDataParallel around the model, each block compiled
    ddp_ours           the same with ub_overlap.ddp.install
    others             as inductor, by our backend with the options of that name

Weights are sharded by rows; those of DDP are whole. All ranks have the same weights and inputs of their own.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

import ub_overlap
from ub_overlap.compiler.reports.history import HISTORY
from ub_overlap.runtime import verify
from ub_overlap.runtime.site_id import SiteId
from ub_overlap.tools.rank_process import World

from ..blocks.model import BlockSizes, LlamaBlock, fresh_code
from ..parallel.variant import COMPUTE, INDUCTOR, ParallelVariant, backend
from .inductor_options import INDUCTOR_RIVALS, inductor_options

FSDP2, FSDP2_OURS, FSDP2_SYMM = "fsdp2", "fsdp2_ours", "fsdp2_symm"
TORCH = (COMPUTE, INDUCTOR, FSDP2)
SHARDED = (FSDP2, FSDP2_OURS, FSDP2_SYMM)
"""Variants that use fully_shard."""
DDP, DDP_OURS = "ddp", "ddp_ours"
HOOKED = (*SHARDED, DDP, DDP_OURS)
"""Variants that communicate in hooks, outside of the graphs."""
RIVALS = (*INDUCTOR_RIVALS, FSDP2_OURS, FSDP2_SYMM, DDP, DDP_OURS)
"""Variants next to those of TORCH, of ours by options, that have names of their own."""


class GatheredWeight(nn.Module):
    """A module that stores this rank's rows of its weight, and gathers the others where it is used."""

    def __init__(self, whole: Tensor, rank: int, ranks: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(whole.detach().chunk(ranks)[rank].clone())

    def gathered(self) -> Tensor:
        return funcol.all_gather_tensor_autograd(self.weight, 0, dist.group.WORLD)


class GatheredLinear(GatheredWeight):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.gathered())


class GatheredNorm(GatheredWeight):
    """RMSNorm over the last dim."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.gathered())


@dataclass
class ParallelContext:
    """What all variants share. `compiler`: "inductor" or "aot_eager". `ours`: name -> options of our backend."""

    world: World
    sizes: BlockSizes
    tokens: int
    layers: int
    dtype: torch.dtype
    compiler: str
    ours: dict[str, dict[str, Any]]


def make(name: str, context: ParallelContext) -> ParallelVariant:
    """Return a variant that has run one step."""
    world = context.world
    torch.manual_seed(1)
    with torch.device(world.device):
        blocks = [LlamaBlock(context.sizes).to(context.dtype) for _ in range(context.layers)]
    model: nn.Module = fresh_code(nn.Sequential(*blocks))
    call: Any = model
    arguments = backend(name, context.compiler, context.ours)
    if name in INDUCTOR_RIVALS:
        arguments = {"options": inductor_options(name, context.compiler, world.cuda)}
    if name in HOOKED:
        for block in model.children():
            block.compile(**arguments)
        call = _with_hooks(model, name)
    else:
        if name != COMPUTE:
            shard(model, world)
        call = torch.compile(model, fullgraph=True, **arguments)
    torch.manual_seed(100 + world.rank)
    x, grad = (torch.randn((1, context.tokens, context.sizes.dim), device=world.device, dtype=context.dtype) for _ in range(2))
    settings = arguments["options"] if name in INDUCTOR_RIVALS else {}
    return ParallelVariant(name, model, call, x.requires_grad_(), grad, settings=settings).first_step(world)


def _with_hooks(model: nn.Module, name: str) -> nn.Module:
    """Let FSDP2 or DDP communicate for `model`, whose blocks are compiled. Return what is called."""
    if name in (DDP, DDP_OURS):
        replicated = DistributedDataParallel(model)
        if name == DDP_OURS:
            ub_overlap.ddp.install(replicated)
        return replicated
    for block in model.children():
        fully_shard(block)
    fully_shard(model)
    if name == FSDP2_OURS:
        ub_overlap.fsdp.install(model)
    if name == FSDP2_SYMM:
        if os.environ.get("NCCL_NVLS_ENABLE") != "0":
            raise RuntimeError("NCCL_NVLS_ENABLE=0 must be set: NCCL's symmetric memory uses multicast otherwise")
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_symm_mem_for_comm()
    return model


def shard(model: nn.Module, world: World) -> None:
    """Replace the linears and norms of `model` by ones that gather their weights."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, GatheredLinear(child.weight, world.rank, world.ranks))
            elif isinstance(child, nn.RMSNorm):
                assert child.eps is None and child.weight is not None
                setattr(module, name, GatheredNorm(child.weight, world.rank, world.ranks))


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

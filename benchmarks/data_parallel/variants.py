"""Variants of Llama blocks under data parallelism: FSDP2, weights gathered in the graph, and the compute of one rank alone.

    compute      whole weights, no communication
    inductor     every linear and norm gathers its weight in the graph (ZeRO-3 by functional collectives), torch.compile
    fsdp2        fully_shard of each block and of the model, each block compiled
    fsdp2_ours   the same with ub_overlap.fsdp.install
    fsdp2_symm   the same with set_symm_mem_for_comm, where torch has it; not in one run with ours, whose memory it breaks
    others       as inductor, by our backend with the options of that name

Weights are sharded by rows. All ranks have the same weights and inputs of their own.
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

import ub_overlap
from ub_overlap.compiler.reports.history import HISTORY
from ub_overlap.runtime import verify
from ub_overlap.runtime.site_id import SiteId
from ub_overlap.tools.rank_process import World

from ..blocks.model import BlockSizes, LlamaBlock, fresh_code
from ..parallel.variant import COMPUTE, INDUCTOR, ParallelVariant, backend

FSDP2, FSDP2_OURS, FSDP2_SYMM = "fsdp2", "fsdp2_ours", "fsdp2_symm"
TORCH = (COMPUTE, INDUCTOR, FSDP2)
SHARDED = (FSDP2, FSDP2_OURS, FSDP2_SYMM)
"""Variants that use fully_shard."""


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
    if name in SHARDED:
        _fully_shard(model, name, context.compiler)
    else:
        if name != COMPUTE:
            shard(model, world)
        call = torch.compile(model, fullgraph=True, **backend(name, context.compiler, context.ours))
    torch.manual_seed(100 + world.rank)
    x, grad = (torch.randn((1, context.tokens, context.sizes.dim), device=world.device, dtype=context.dtype) for _ in range(2))
    return ParallelVariant(name, model, call, x.requires_grad_(), grad).first_step(world)


def _fully_shard(model: nn.Module, name: str, compiler: str) -> None:
    for block in model.children():
        fully_shard(block)
        block.compile(backend=compiler)
    fully_shard(model)
    if name == FSDP2_OURS:
        ub_overlap.fsdp.install(model)
    if name == FSDP2_SYMM:
        if os.environ.get("NCCL_NVLS_ENABLE") != "0":
            raise RuntimeError("NCCL_NVLS_ENABLE=0 must be set: NCCL's symmetric memory uses multicast otherwise")
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_symm_mem_for_comm()


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

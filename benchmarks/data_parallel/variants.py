"""Variants of Llama blocks under data parallelism: FSDP2, weights gathered in the graph, and the compute of one rank alone.

    compute      whole weights, no communication
    inductor     every linear gathers its weight in the graph (ZeRO-3 by functional collectives), torch.compile
    fsdp2        fully_shard of each block and of the model, each block compiled
    fsdp2_ours   the same with ub_overlap.fsdp.install
    fsdp2_symm   the same with set_symm_mem_for_comm, where torch has it; not in one run with ours, whose memory it breaks
    others       as inductor, by our backend with the options of that name

Weights of linears are sharded by rows. Norms keep whole weights, and their gradients stay local but in fsdp2: 0.01% of the
bytes. All ranks have the same weights and inputs of their own.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

import ub_overlap
from ub_overlap.compiler.reports.history import HISTORY
from ub_overlap.runtime import verify
from ub_overlap.runtime.site_id import SiteId
from ub_overlap.tools.rank_process import World

from ..blocks.model import BlockSizes, LlamaBlock, fresh_code

COMPUTE, INDUCTOR, FSDP2, FSDP2_OURS, FSDP2_SYMM = "compute", "inductor", "fsdp2", "fsdp2_ours", "fsdp2_symm"
TORCH = (COMPUTE, INDUCTOR, FSDP2)
SHARDED = (FSDP2, FSDP2_OURS, FSDP2_SYMM)
"""Variants that use fully_shard."""


class GatheredLinear(nn.Module):
    """A linear that stores this rank's rows of its weight, and gathers the others where it is used."""

    def __init__(self, whole: Tensor, rank: int, ranks: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(whole.detach().chunk(ranks)[rank].clone())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, funcol.all_gather_tensor_autograd(self.weight, 0, dist.group.WORLD))


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


@dataclass
class ParallelVariant:
    """A model with its input. `sites`: by strategy, how our backend runs its collectives."""

    name: str
    model: nn.Module
    call: Any
    x: Tensor
    grad: Tensor
    sites: str = ""
    digests: tuple[str, ...] = ()
    """Of its plans."""

    def step(self) -> None:
        """Run forward and backward; gradients accumulate."""
        self.call(self.x).backward(self.grad)

    def forward(self) -> None:
        with torch.no_grad():
            self.call(self.x)

    def results(self) -> dict[str, Tensor]:
        """Return output and gradients of one step with cleared gradients."""
        self.model.zero_grad(set_to_none=True)
        self.x.grad = None
        out = self.call(self.x)
        out.backward(self.grad)
        grads = {"input": self.x.grad, **{name: _local(p.grad) for name, p in self.model.named_parameters()}}
        return {"output": out.detach(), **{name: g.detach().clone() for name, g in grads.items() if g is not None}}


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
        call = torch.compile(model, fullgraph=True, **_backend(name, context))
    torch.manual_seed(100 + world.rank)
    x, grad = (torch.randn((1, context.tokens, context.sizes.dim), device=world.device, dtype=context.dtype) for _ in range(2))
    variant = ParallelVariant(name, model, call, x.requires_grad_(), grad)
    mark = HISTORY.mark()
    variant.step()
    variant.digests = tuple(plan.digest for plan in HISTORY.since(mark))
    strategies = [str(d.strategy).partition(":")[0] for plan in HISTORY.since(mark) for d in plan.decisions]
    variant.sites = ", ".join(f"{count} {strategy}" for strategy, count in sorted(Counter(strategies).items()))
    world.sync()
    return variant


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


def _local(grad: Tensor | None) -> Tensor | None:
    return grad.to_local() if isinstance(grad, DTensor) else grad


def shard(model: nn.Module, world: World) -> None:
    """Replace the linears of `model` by ones that gather their weights."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, GatheredLinear(child.weight, world.rank, world.ranks))


def _backend(name: str, context: ParallelContext) -> dict[str, Any]:
    if name not in context.ours:
        return {"backend": context.compiler}
    options = dict(context.ours[name])
    if context.compiler == "aot_eager":
        options["inner"] = "aot_eager"
    return {"backend": "ub_overlap", "options": options}


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


def differences(variant: ParallelVariant, reference: ParallelVariant, world: World) -> dict[str, float]:
    """Return ||a - b|| / ||b|| of the output and of each gradient that both have in one form, of the worst rank."""
    mine, true = variant.results(), reference.results()
    names = [n for n in mine if n in true and mine[n].shape == true[n].shape]
    errors = [float((mine[n].double() - true[n].double()).norm() / true[n].double().norm().clamp(min=1e-30)) for n in names]
    return dict(zip(names, world.worst(errors), strict=True))

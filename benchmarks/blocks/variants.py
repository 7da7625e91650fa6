"""Variants of a block: Inductor, async-TP, our backend, Inductor without communication, and the compute of one rank alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

import ub_overlap
from ub_overlap.compiler.reports.history import HISTORY
from ub_overlap.tools.rank_process import World

from .model import BlockSizes, compute_only, parallel, stack
from .no_communication import removal_pass
from .table import NO_COMMUNICATION


@dataclass
class BlockVariant:
    """A compiled block with its own input. `sites`: the collectives that our backend overlapped, e.g. "8 of 8"."""

    name: str
    block: torch.nn.Module
    call: Any
    x: Tensor
    grad: Tensor
    sites: str = ""
    why: dict[str, str] = field(default_factory=dict)
    written: list[Tensor] = field(default_factory=list)
    """One element of each weight, if weights change before each step."""

    def step(self) -> None:
        """Run forward and backward; gradients accumulate, as in a training step after the first microbatch.

        Before that, one launch changes the elements `written`, as an optimizer step changes all."""
        if self.written:
            torch._foreach_neg_(self.written)
        local(self.call(self.x)).backward(self.grad)

    def forward(self) -> None:
        with torch.no_grad():
            self.call(self.x)

    def results(self) -> dict[str, Tensor]:
        """Return output and gradients of one step with cleared gradients."""
        self.block.zero_grad(set_to_none=True)
        self.x.grad = None
        out = local(self.call(self.x))
        out.backward(self.grad)
        grads = {"input": self.x.grad, **{name: p.grad for name, p in self.block.named_parameters()}}
        return {"output": out.detach(), **{name: local(g).clone() for name, g in grads.items() if g is not None}}


def local(value: Any) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


@dataclass
class BlockContext:
    """Properties that all variants share. `compiler`: "inductor" or "aot_eager". `ours`: name -> options of our backend.

    `mesh`: of `ranks` ranks. In mirror mode these are more than the processes of `world`."""

    world: World
    mesh: DeviceMesh
    ranks: int
    sizes: BlockSizes
    tokens: int
    dtype: torch.dtype
    compiler: str
    ours: dict[str, dict[str, Any]]
    write: bool = False
    """Weights change before each step."""
    layers: int = 1
    """Blocks in a row."""
    model: str = "block"
    """A key of `model.MODELS`."""
    pack_weights: Sequence[str] = ()
    """Variants of ours whose sibling weights ub_overlap.pack puts next to each other."""


def make(name: str, context: BlockContext) -> BlockVariant:
    """Return a compiled variant: forward, backward, and forward without gradients."""
    world, sizes = context.world, context.sizes
    if name in TRANSFORMER_ENGINE:
        return make_transformer_engine(name, context)
    if name == "compute":
        block = compute_only(sizes, context.ranks, context.tokens, world.device, context.dtype, context.layers, context.model)
        call = torch.compile(block, backend=context.compiler)
    else:
        block = parallel(sizes, context.mesh, world.device, context.dtype, context.layers, context.model)
        if name in context.ours:
            options = dict(context.ours[name])
            if name in context.pack_weights:
                ub_overlap.pack(block)
            if context.compiler == "aot_eager":
                options["inner"] = "aot_eager"
            call = torch.compile(block, backend="ub_overlap", fullgraph=True, options=options)
        elif name == NO_COMMUNICATION:
            call = torch.compile(block, fullgraph=True, options={"post_grad_custom_pre_pass": removal_pass()})
        elif name == "asynctp":
            call = torch.compile(block, fullgraph=True, options={"_micro_pipeline_tp": True})
        else:
            call = torch.compile(block, backend=context.compiler, fullgraph=True)
    torch.manual_seed(100 + world.rank)
    shape = (1, context.tokens // context.ranks, sizes.dim)
    x, grad = (torch.randn(shape, device=world.device, dtype=context.dtype) for _ in range(2))
    variant = BlockVariant(name, block, call, x.requires_grad_(), grad)
    if context.write:
        variant.written = [local(p.data).view(-1)[:1] for p in block.parameters()]
    mark = HISTORY.mark()
    if name == "asynctp":
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group

        enable_symm_mem_for_group(mesh_group(context.mesh))
    variant.step()
    mine = [d for plan in HISTORY.since(mark) for d in plan.decisions]
    variant.forward()
    world.sync()
    if name in context.ours:
        variant.sites = f"{sum(d.overlapped for d in mine)} of {len(mine)}"
    if name == "asynctp":
        variant.sites = f"{fused_ops(variant, world)} fused"
    return variant


TRANSFORMER_ENGINE = ("te", "te_fp8")


def make_transformer_engine(name: str, context: BlockContext) -> BlockVariant:
    """Return TransformerEngine's LayerNormMLP of the same sizes: in 16 bits, or in float8 with delayed scaling."""
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe

    world, sizes = context.world, context.sizes
    group = dist.group.WORLD
    layers = [
        te.LayerNormMLP(
            sizes.dim,
            sizes.wide,
            bias=False,
            normalization="RMSNorm",
            activation="swiglu",
            tp_group=group,
            tp_size=context.ranks,
            sequence_parallel=True,
            set_parallel_mode=True,
            seq_length=context.tokens,
            micro_batch_size=1,
            params_dtype=context.dtype,
            device=world.device,
        )
        for _ in range(context.layers)
    ]
    module, scaling = stack(layers), recipe.DelayedScaling()

    def call(x: Tensor) -> Tensor:
        with te.fp8_autocast(enabled=name == "te_fp8", fp8_recipe=scaling, fp8_group=group):
            return module(x)

    torch.manual_seed(100 + world.rank)
    shape = (context.tokens // context.ranks, 1, sizes.dim)
    x, grad = (torch.randn(shape, device=world.device, dtype=context.dtype) for _ in range(2))
    variant = BlockVariant(name, module, call, x.requires_grad_(), grad)
    if context.write:
        variant.written = [p.data.view(-1)[:1] for p in module.parameters()]
    variant.step()
    variant.forward()
    world.sync()
    return variant


def mesh_group(mesh: DeviceMesh) -> Any:
    return mesh.get_group().group_name


def fused_ops(variant: BlockVariant, world: World) -> int:
    """Count torch's fused ops in one step. Zero means that async-TP is off."""
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        variant.step()
        world.sync()
    return sum(event.name.startswith("symm_mem::fused") for event in trace.events())


def differences(variant: BlockVariant, reference: BlockVariant, world: World) -> dict[str, float]:
    """Return ||a - b|| / ||b|| of output and gradients, maximum over ranks; NaN counts as 1e9."""
    theirs, mine = reference.results(), variant.results()
    errors = []
    for name, value in theirs.items():
        error = ((mine[name].float() - value.float()).norm() / value.float().norm().clamp_min(1e-30)).item()
        errors.append(error if error == error else 1e9)
    return dict(zip(theirs, world.worst(errors), strict=True))

"""Rank functions of test_stage_data_parallel.py: two pipeline ranks with one stage or two, and two ranks share a stage."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import ub_overlap
from ub_overlap.runtime.deferred_gradients import DeferredGradients

from .rank_failures import attempt
from .rank_stage import stages_of

WIDTH, MICROBATCHES, STEPS = 8, 4, 2
LOW_PRECISION = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Product(nn.Module):
    """A linear whose weight is a product: the gradient of each factor reads the other."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.left * self.right)


class Layers(nn.Module):
    """`shift` has the gradient of an activation, which the gradient of the weight in front of it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, WIDTH), Product(), nn.LayerNorm(WIDTH)
        self.shift = nn.Parameter(torch.randn(1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(self.norm(x)) + self.shift))


def wrapped(module: nn.Module, kind: str, mesh: Any) -> Any:
    """Compile a stage's module, and wrap it. `kind`: ddp, unused (parameters), fsdp, blocks or low_precision (fully_shard)."""
    options: Any = {"inner": "aot_eager", "defer_weight_gradients": True}
    module.compile(backend="ub_overlap", options=options)
    if kind in ("ddp", "unused"):
        return DistributedDataParallel(module, process_group=mesh.get_group(), find_unused_parameters=kind == "unused")
    if kind == "blocks":
        for block in module.children():
            fully_shard(block, mesh=mesh)
    return fully_shard(module, mesh=mesh, **({"mp_policy": LOW_PRECISION} if kind == "low_precision" else {}))


def expected_gradients(whole: list[nn.Module], inputs: list[Tensor], dtype: torch.dtype) -> list[list[Tensor]]:
    """Return the mean over data and microbatches, summed in fp32, by stage."""
    modules = [copy.deepcopy(m).to(dtype) for m in whole]
    sums = [[torch.zeros_like(p, dtype=torch.float32) for p in m.parameters()] for m in modules]
    for x in inputs:
        for one in x.chunk(MICROBATCHES):
            y = nn.Sequential(*modules)(one.to(dtype))
            nn.functional.mse_loss(y, torch.zeros_like(y)).backward()
            for module, totals in zip(modules, sums, strict=True):
                for p, total in zip(module.parameters(), totals, strict=True):
                    total += torch.zeros(()) if p.grad is None else p.grad.float() / (MICROBATCHES * len(inputs))
                module.zero_grad()
    return sums


def gradients(rank: int, world: int, name: str, kind: str) -> dict[str, Any]:
    """Train with data parallelism within stages. Return wrong gradients, deferred graphs and reductions of the last bucket."""
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    pp_rank, dp_rank = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    stages = stages_of(name, pp_rank, 2)
    count, is_low = 2 * len(stages), kind == "low_precision"
    torch.manual_seed(0)
    whole: list[nn.Module] = [Layers() for _ in range(count)]
    for module in whole if kind == "unused" else ():
        module.idle = nn.Linear(2, 2)
    modules = [wrapped(copy.deepcopy(whole[i]), kind, mesh["dp"]) for i in stages]
    reduced: list[int] = []

    def note(state, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations, which must not be text
        if bucket.is_last():
            reduced.append(bucket.index())
        return default_hooks.allreduce_hook(state, bucket)

    for module in modules:
        if isinstance(module, DistributedDataParallel):
            module.register_comm_hook(mesh["dp"].get_group(), note)
    group = ub_overlap.pipeline.make_group(mesh["pp"])
    made = [
        ub_overlap.pipeline.Stage(m, i, count, torch.device("cpu"), group=group) for m, i in zip(modules, stages, strict=True)
    ]
    runner: Any = get_schedule_class(name)
    schedule = runner(made if len(made) > 1 else made[0], MICROBATCHES, loss_fn=nn.functional.mse_loss)
    wrong, deferred = [], 0
    add = DeferredGradients.add

    def add_and_count(self: DeferredGradients, *args: Any) -> list[Tensor]:
        nonlocal deferred
        deferred += 1
        return add(self, *args)

    for step in range(STEPS):
        inputs = [torch.randn(MICROBATCHES, WIDTH, generator=torch.Generator().manual_seed(10 * step + i)) for i in range(2)]
        x = inputs[dp_rank].bfloat16() if is_low else inputs[dp_rank]
        with mock.patch.object(DeferredGradients, "add", add_and_count):
            last = {"target": torch.zeros_like(x)} if count - 1 in stages else {}
            schedule.step(*((x,) if 0 in stages else ()), **last)
        expected = expected_gradients(whole, inputs, torch.bfloat16 if is_low else torch.float32)
        for index, module in zip(stages, modules, strict=True):
            for (label, p), want in zip(module.named_parameters(), expected[index], strict=True):
                got = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
                if got is None and not want.any():
                    continue
                if got is None or not torch.allclose(got.float(), want, rtol=1e-4, atol=1e-5 * want.abs().max().item()):
                    wrong.append(f"step {step}, stage {index}: {label}")
            module.zero_grad()
    dist.barrier()
    return {"wrong": wrong, "deferred": deferred, "reduced": len(reduced)}


def refused(rank: int, world: int) -> list[str]:
    """Return the errors of wrappings that accumulate no gradients over microbatches."""
    mesh = init_device_mesh("cpu", (world,))
    parts, buckets = Layers(), Layers()
    fully_shard(parts.up, mesh=mesh)
    buckets.up = DistributedDataParallel(buckets.up)  # type: ignore[assignment]
    static = DistributedDataParallel(Layers(), static_graph=True)
    from ub_overlap.runtime.point_to_point.stage_data_parallel import gradient_sync

    modules: tuple[nn.Module, ...] = (parts, buckets, static)
    return [attempt(lambda: gradient_sync(module))["text"] for module in modules]  # noqa: B023  (called in this turn)

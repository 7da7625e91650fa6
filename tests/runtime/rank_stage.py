"""Rank functions of test_stage.py: stages of two ranks, and a latch in front of weight gradients."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import get_schedule_class

import ub_overlap
from ub_overlap import _torch_compat
from ub_overlap.runtime.deferred_gradients import DeferredGradients
from ub_overlap.runtime.point_to_point.send_order import SendOrder

WIDTH, MICROBATCHES = 8, 4


class Layers(nn.Module):
    """Not an nn.Sequential, which torch compiles layer by layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


def make_schedule(rank: int, world: int, name: str, stages: list[int]) -> tuple[Any, list[nn.Module]]:
    group = ub_overlap.pipeline.make_group()
    torch.manual_seed(rank)
    modules: list[nn.Module] = [Layers() for _ in stages]
    for module in modules:
        module.compile(backend="ub_overlap", options={"inner": "aot_eager", "defer_weight_gradients": True})
    made = [
        ub_overlap.pipeline.Stage(m, index, world * len(stages), torch.device("cpu"), group=group)
        for m, index in zip(modules, stages, strict=True)
    ]
    runner = get_schedule_class(name)
    return runner(made if len(made) > 1 else made[0], MICROBATCHES, loss_fn=nn.functional.mse_loss), modules  # type: ignore[arg-type]


def step(rank: int, world: int, schedule: Any) -> None:
    x = torch.randn(MICROBATCHES, WIDTH)
    schedule.step(*((x,) if rank == 0 else ()), **({"target": torch.zeros_like(x)} if rank == world - 1 else {}))


def gradient_arrives_before_weights(rank: int, world: int, early: bool, topic: str) -> dict[str, Any]:
    """Rank 1 computes weight gradients only once rank 0 has begun the backward that reads the gradient of rank 1's input."""
    torch._dynamo.reset()
    store = dist.PrefixStore(topic, _torch_compat.store_of(dist.group.WORLD))
    schedule, modules = make_schedule(rank, world, "1F1B", [rank])
    step(rank, world, schedule)  # compiles, and makes the channels
    dist.barrier()
    late: list[int] = []
    calls = 0
    run, backward = DeferredGradients.run, ub_overlap.pipeline.Stage.backward_one_chunk

    def run_after_latch(self: DeferredGradients) -> None:
        nonlocal calls
        if rank == 1 and self:
            try:
                store.wait([f"backward{calls}"], timedelta(seconds=20 if early else 1))
            except dist.DistStoreError:
                late.append(calls)
            calls += 1
        run(self)

    def backward_with_note(self: Any, chunk: int, **kwargs: Any) -> None:
        if rank == 0:
            store.set(f"backward{chunk}", "1")
        backward(self, chunk, **kwargs)

    with (
        mock.patch.object(DeferredGradients, "run", run_after_latch),
        mock.patch.object(ub_overlap.pipeline.Stage, "backward_one_chunk", backward_with_note),
        mock.patch.object(SendOrder, "may_send_early", (lambda *_: True) if early else (lambda *_: False)),
    ):
        begin = time.monotonic()
        step(rank, world, schedule)
    dist.barrier()
    has_all = all(p.grad is not None for module in modules for p in module.parameters())
    return {"late": late, "calls": calls, "has_all": has_all, "seconds": time.monotonic() - begin}


def order_of_messages(rank: int, world: int) -> list[str]:
    """A V of four stages on two ranks overlaps forward and backward: outputs and gradients share each channel."""
    torch._dynamo.reset()
    stages = [rank, 2 * world - 1 - rank]
    schedule, modules = make_schedule(rank, world, "DualPipeV", stages)
    wrong = []
    torch.manual_seed(5)
    x = torch.randn(MICROBATCHES, WIDTH)
    weights: list[Any] = [None] * world
    dist.all_gather_object(weights, {s: m.state_dict() for s, m in zip(stages, modules, strict=True)})
    whole = [Layers() for _ in range(2 * world)]
    for part in weights:
        for index, state in part.items():
            whole[index].load_state_dict(state)
    y: Tensor = nn.Sequential(*whole)(x)
    sum(nn.functional.mse_loss(one, torch.zeros_like(one)) for one in y.chunk(MICROBATCHES)).backward()  # type: ignore[union-attr]
    last = {"target": torch.zeros_like(x)} if rank == 0 else {}
    schedule.step(*((x,) if rank == 0 else ()), **last)
    for index, module in zip(stages, modules, strict=True):
        for (name, ours), theirs in zip(module.named_parameters(), whole[index].parameters(), strict=True):
            assert ours.grad is not None and theirs.grad is not None
            if not torch.allclose(ours.grad * MICROBATCHES, theirs.grad, rtol=1e-4, atol=1e-6):
                wrong.append(f"stage {index}: {name}")
    return wrong

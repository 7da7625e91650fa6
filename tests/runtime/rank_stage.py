"""Rank functions of test_stage.py: stages of two ranks, and a latch in front of weight gradients."""

from __future__ import annotations

import contextlib
import os
import random
import signal
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
from ub_overlap.runtime import settings
from ub_overlap.runtime.deferred_gradients import DeferredGradients
from ub_overlap.runtime.point_to_point.send_order import SendOrder

from .rank_failures import attempt

WIDTH, MICROBATCHES = 8, 4


class Layers(nn.Module):
    """Not an nn.Sequential, which torch compiles layer by layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


def make_schedule(
    rank: int,
    world: int,
    name: str,
    stages: list[int],
    microbatches: int = MICROBATCHES,
    compiled: bool = True,
    members: Any = None,
) -> tuple[Any, list[nn.Module]]:
    group = ub_overlap.pipeline.make_group(members)
    torch.manual_seed(rank)
    modules: list[nn.Module] = [Layers() for _ in stages]
    for module in modules if compiled else ():
        module.compile(backend="ub_overlap", options={"inner": "aot_eager", "defer_weight_gradients": True})
    made = [
        ub_overlap.pipeline.Stage(m, index, world * len(stages), torch.device("cpu"), group=group)
        for m, index in zip(modules, stages, strict=True)
    ]
    runner = get_schedule_class(name)
    return runner(made if len(made) > 1 else made[0], microbatches, loss_fn=nn.functional.mse_loss), modules  # type: ignore[arg-type]


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


def stages_of(name: str, rank: int, world: int) -> list[int]:
    if name == "1F1B":
        return [rank]
    return [rank, rank + world] if name == "Interleaved1F1B" else [rank, 2 * world - 1 - rank]


def delayed_steps(rank: int, world: int, seed: int, steps: int) -> list[str]:
    """Steps of three schedules whose ranks are late at random have the gradients of a step without delays."""
    torch._dynamo.reset()
    late = random.Random(100 * seed + rank)
    wrong = []
    for name in ("1F1B", "Interleaved1F1B", "ZBVZeroBubble"):
        stages = stages_of(name, rank, world)
        schedule, modules = make_schedule(rank, world, name, stages, microbatches=2 * world)
        x = torch.randn(2 * world, WIDTH, generator=torch.Generator().manual_seed(seed))
        last = world * len(stages) - 1

        def gradients() -> list[Tensor]:
            for module in modules:  # noqa: B023  (runs in this turn of the loop)
                module.zero_grad()
            inputs = (x,) if 0 in stages else ()  # noqa: B023
            schedule.step(*inputs, **({"target": torch.zeros_like(x)} if last in stages else {}))  # noqa: B023
            return [p.grad.clone() for m in modules for p in m.parameters() if p.grad is not None]  # noqa: B023

        expected = gradients()
        with contextlib.ExitStack() as patches:
            for owner, method in (
                (ub_overlap.pipeline.Stage, "forward_one_chunk"),
                (ub_overlap.pipeline.Stage, "backward_one_chunk"),
                (ub_overlap.pipeline.Stage, "get_bwd_send_ops"),
                (ub_overlap.pipeline.Stage, "get_fwd_recv_ops"),
                (DeferredGradients, "run"),
            ):
                patches.enter_context(mock.patch.object(owner, method, after_a_delay(getattr(owner, method), late)))
            for number in range(steps):
                found = gradients()
                if len(found) != len(expected) or not all(map(torch.equal, found, expected)):
                    wrong.append(f"{name}, step {number}")
    dist.barrier()
    return wrong


def after_a_delay(method: Any, late: random.Random) -> Any:
    def delayed(*args: Any, **kwargs: Any) -> Any:
        if late.random() < 0.3:
            time.sleep(late.uniform(0.0, 0.004))
        return method(*args, **kwargs)

    return delayed


def stage_fails_in_a_schedule(rank: int, world: int, step_s: float, how: str, name: str, others: int) -> dict[str, Any]:
    """Rank 1 of a pipeline fails in the third step, in its second forward. `others`: the first ranks, which are not in it."""
    settings.configure(step_timeout_s=step_s)
    members = dist.new_group(list(range(others, world)))
    if rank < others:
        return {}
    rank, world = rank - others, world - others
    stages = stages_of(name, rank, world)
    schedule, _ = make_schedule(rank, world, name, stages, microbatches=world, compiled=False, members=members)
    forward, seen = ub_overlap.pipeline.Stage.forward_one_chunk, 0

    def fail(self: Any, chunk: int, *args: Any, **kwargs: Any) -> Any:
        nonlocal seen
        seen += 1
        if rank == 1 and seen == 2:
            if how == "drop":
                time.sleep(60)
            os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[how])
        return forward(self, chunk, *args, **kwargs)

    x, last = torch.randn(world, WIDTH), world * len(stages) - 1

    def run() -> None:
        schedule.step(*((x,) if 0 in stages else ()), **({"target": torch.zeros_like(x)} if last in stages else {}))

    run(), run()
    dist.barrier(members)
    with mock.patch.object(ub_overlap.pipeline.Stage, "forward_one_chunk", fail):
        found = attempt(run)
        # The last sends of a step may be completed before their receiver fails: then the next step's raise the error.
        return found if found["error"] else attempt(run)

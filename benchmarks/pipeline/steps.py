"""Steps of a pipeline schedule of torch.distributed.pipelining, over c10d and over channels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

import ub_overlap
from ub_overlap.tools.rank_process import World

from ..timing import Clock
from .messages import C10D, OURS


class Mlp(nn.Module):
    """`layers` times x + down(gelu(up(x))), in bf16."""

    def __init__(self, width: int, hidden: int, layers: int, device: torch.device) -> None:
        super().__init__()
        options: dict[str, Any] = {"bias": False, "device": device, "dtype": torch.bfloat16}
        self.up = nn.ModuleList(nn.Linear(width, hidden, **options) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(hidden, width, **options) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(nn.functional.gelu(up(x)))
        return x


class PlainStage(PipelineStage):
    """A PipelineStage that sends no first message to its own rank, as torch up to 2.14 does in a V. Channels refuse it."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        ops = super()._get_init_p2p_neighbors_ops()  # type: ignore[misc]
        return [op for op in ops if op.group_peer != self.group_rank]


DEFERRED = "deferred"
"""Our channels, and stages that send before weight gradients."""
SPLIT = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
"""Schedules whose stages are compiled only where they defer weight gradients."""


def stages_of(schedule: str, rank: int, ranks: int) -> list[int]:
    """Return the stages of a rank: one, two in a loop, or two in a V."""
    if schedule in ("ZBVZeroBubble", "DualPipeV"):
        return [rank, 2 * ranks - 1 - rank]
    return [rank, rank + ranks] if schedule.startswith("Interleaved") else [rank]


def make_step(
    world: World,
    schedule: str,
    group: Any,
    width: int,
    tokens: int,
    layers: int,
    microbatches: int,
    transport: str,
    compiled: bool,
) -> tuple[Callable[[], None], list[Mlp]]:
    """Return a step, forward and backward, and this rank's modules."""
    schedule_class = get_schedule_class(schedule)
    of_rank = stages_of(schedule, world.rank, world.ranks)
    count = world.ranks * len(of_rank)
    torch.manual_seed(0)
    modules = [Mlp(width, 4 * width, layers, world.device) for _ in of_rank]
    defers = transport == DEFERRED
    for module in modules if compiled and (defers or schedule not in SPLIT) else ():
        module.compile(backend="ub_overlap", options={"defer_weight_gradients": defers})
    stage_class = {C10D: PipelineStage, OURS: PlainStage, DEFERRED: ub_overlap.pipeline.Stage}[transport]
    stages = [stage_class(m, index, count, world.device, group=group) for m, index in zip(modules, of_rank, strict=True)]

    def loss(y: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(y.float(), target.float())

    runner: Any = schedule_class(stages if len(stages) > 1 else stages[0], microbatches, loss_fn=loss)
    x = torch.randn(microbatches, tokens, width, device=world.device, dtype=torch.bfloat16)
    inputs = (x,) if 0 in of_rank else ()
    last = {"target": torch.zeros_like(x), "losses": []} if count - 1 in of_rank else {}

    def step() -> None:
        for module in modules:
            module.zero_grad(set_to_none=True)
        runner.step(*inputs, **last)

    return step, modules


def measure(
    world: World, schedule: str, width: int, tokens: int, layers: int, microbatches: int, iters: int, warm: int, compiled: bool
) -> dict[str, Any]:
    """Return milliseconds of a step over each transport, and the largest difference of their gradients."""
    groups = {C10D: dist.new_group(list(range(world.ranks)))}
    groups[OURS] = ub_overlap.pipeline.make_group(groups[C10D])
    if compiled:
        groups[DEFERRED] = groups[OURS]
    calls: dict[str, Callable[[], Any]] = {}
    gradients: dict[str, list[Tensor]] = {}
    for transport, group in groups.items():
        torch.manual_seed(world.rank)
        step, modules = make_step(world, schedule, group, width, tokens, layers, microbatches, transport, compiled)
        step()
        world.sync()
        gradients[transport] = [p.grad.clone() for module in modules for p in module.parameters() if p.grad is not None]
        calls[transport] = step
    pairs = [pair for other in groups if other != C10D for pair in zip(gradients[C10D], gradients[other], strict=True)]
    difference = max(((a - b).abs().max() / a.abs().max()).item() for a, b in pairs)
    times, spreads = Clock(world).rounds(calls, iters, warm)
    sizes = {"width": width, "tokens": tokens, "layers": layers, "microbatches": microbatches}
    return {
        "kind": "step",
        "schedule": schedule,
        "compiled": compiled,
        **sizes,
        "ms": times,
        "spread_ms": spreads,
        "difference": world.worst([difference])[0],
    }

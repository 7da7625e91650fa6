"""Training steps of whole programs, for the fault matrix: compiled, fully_shard, DistributedDataParallel, two hosts, pipeline.

Each maker returns a step. A step runs forward and backward without an update, and returns the gradients: the same in every
call, unless a rank is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

import ub_overlap

Step = Callable[[], list[Tensor]]
ROWS, WIDTH, HIDDEN = 8, 16, 32
MICROBATCHES = 4
OPTIONS = {"overlap": "force", "inner": "aot_eager"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def make_compiled(device: torch.device) -> Step:
    """Return a step of a tensor-parallel block: gathers before matmuls, reductions behind them, forward and backward."""
    group = dist.group.WORLD
    up, down = (nn.Parameter(torch.randn(*shape, device=device) / 4) for shape in ((WIDTH, HIDDEN), (HIDDEN, WIDTH)))
    x = torch.randn(ROWS, WIDTH, device=device)

    def forward(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        hidden = torch.relu(funcol.all_gather_tensor_autograd(x, 0, group) @ up)  # type: ignore[arg-type]
        return funcol.reduce_scatter_tensor_autograd(hidden @ down, "sum", 0, group)  # type: ignore[arg-type]

    run = torch.compile(forward, backend="ub_overlap", options=OPTIONS, fullgraph=True)
    return lambda: list(torch.autograd.grad(run(x, up, down).square().sum(), (up, down)))


def make_hierarchical(device: torch.device) -> Step:
    """Return a step whose weights are gathered over two hosts of two ranks, level by level."""
    ub_overlap.configure(hosts="0,0,1,1")
    group = dist.group.WORLD
    shard = nn.Parameter(torch.randn(4, WIDTH, device=device) / 4)
    x = torch.randn(ROWS, WIDTH, device=device)

    def forward(x: Tensor, shard: Tensor) -> Tensor:
        return torch.tanh(x @ funcol.all_gather_tensor_autograd(shard, 0, group).t())  # type: ignore[arg-type]

    options = {**OPTIONS, "overrides": {"*": "split"}, "hierarchical": "force", "coalesce": "off"}
    run = torch.compile(forward, backend="ub_overlap", options=options, fullgraph=True)
    return lambda: list(torch.autograd.grad(run(x, shard).square().sum(), (shard,)))


def make_fully_sharded(device: torch.device) -> Step:
    """Return a step of blocks whose weights `fully_shard` gathers, by our collectives."""
    model: nn.Module = nn.Sequential(*(fully_shard(Block().to(device)) for _ in range(3)))
    ub_overlap.fsdp.install(fully_shard(model))
    return _step_of(model, device)


def make_replicated(device: torch.device) -> Step:
    """Return a step of blocks whose gradients DistributedDataParallel averages, by our hook."""
    model = DistributedDataParallel(nn.Sequential(*(Block() for _ in range(3))).to(device), bucket_cap_mb=0.004)
    ub_overlap.ddp.install(model)
    return _step_of(model, device)


def make_pipeline(device: torch.device) -> Step:
    """Return a step of the schedule 1F1B, one stage a rank, whose messages take our channels."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = Block().to(device)
    stage = PipelineStage(model, rank, ranks, device, group=ub_overlap.pipeline.make_group())
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    x = torch.randn(ROWS, WIDTH, device=device)
    inputs, target = ((x,) if rank == 0 else ()), ({"target": torch.zeros_like(x)} if rank == ranks - 1 else {})
    return _with_gradients(model, lambda: schedule.step(*inputs, **target))


def _step_of(model: nn.Module, device: torch.device) -> Step:
    x = torch.randn(ROWS, WIDTH, device=device)
    return _with_gradients(model, lambda: model(x).square().sum().backward())


def _with_gradients(model: nn.Module, run: Callable[[], Any]) -> Step:
    def step() -> list[Tensor]:
        model.zero_grad()
        run()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        return [(grad.to_local() if hasattr(grad, "to_local") else grad).clone() for grad in grads]

    return step


STEPS: dict[str, Callable[[torch.device], Step]] = {
    "compiled step": make_compiled,
    "FSDP2 step": make_fully_sharded,
    "DDP step": make_replicated,
    "two hosts": make_hierarchical,
    "pipeline step": make_pipeline,
}
"""By the kind of the fault matrix."""
RANKS = {"two hosts": 4, "pipeline step": 3}
"""The ranks of those that need a number of them."""

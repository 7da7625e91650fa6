"""Training programs, for the fault matrix and the soak: compiled, fully_shard, DistributedDataParallel, hosts, pipeline.

Each maker returns a `Program`: a training step of this rank, and what one process computes for all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

import ub_overlap

ROWS, WIDTH, HIDDEN, BLOCKS = 8, 24, 48, 3
"""Of a rank's part of a batch, and of a model that 2, 3, 4, 6 or 8 ranks share."""
MICROBATCHES = 4
OPTIONS = {"overlap": "force", "inner": "aot_eager"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


@dataclass
class Program:
    """A training program of this rank.

    `parameters`: its own, or its parts of whole ones. `run`: forward and backward on its part of a whole batch.
    `sizes`: of all whole parameters. `dims`: the one along which ranks share each, None where a rank has all of it.
    `loss`: from whole parameters and a whole batch, on one process. `held`: which parameters this rank has, None for all.
    """

    parameters: Sequence[nn.Parameter]
    run: Callable[[Tensor], None]
    sizes: Sequence[Sequence[int]]
    dims: Sequence[int | None]
    loss: Callable[[Sequence[Tensor], Tensor], Tensor]
    held: range | None = None

    def local(self) -> list[Tensor]:
        """Return this rank's memory of its parameters."""
        with torch.no_grad():
            return [p.to_local() if isinstance(p, DTensor) else p.detach() for p in self.parameters]

    def parts(self, wholes: Sequence[Tensor]) -> list[Tensor]:
        """Return what this rank has of whole tensors, one for each parameter."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        pairs = [(wholes[i], self.dims[i]) for i in (range(len(wholes)) if self.held is None else self.held)]
        return [whole if dim is None else whole.chunk(ranks, dim)[rank] for whole, dim in pairs]

    def gradients(self, x: Tensor) -> list[Tensor]:
        """Run a step without an update, and return a copy of this rank's gradients."""
        for parameter in self.parameters:
            parameter.grad = None
        self.run(x)
        grads = [p.grad for p in self.parameters if p.grad is not None]
        return [(grad.to_local() if isinstance(grad, DTensor) else grad).clone() for grad in grads]


def own_rows(x: Tensor) -> Tensor:
    return x.chunk(dist.get_world_size())[dist.get_rank()]


def make_compiled(device: torch.device) -> Program:
    """Return a tensor-parallel block: gathers before matmuls, reductions behind them, forward and backward."""
    return _tensor_parallel(device, _compile_block(dist.group.WORLD))


def make_renewed(device: torch.device) -> Program:
    """Return the tensor-parallel block in a group that each step destroys and makes again, as a program that recovers."""
    group: Any = None

    def renew_and_run(*args: Tensor) -> Tensor:
        nonlocal group
        if group is not None:
            dist.barrier()  # an abort would end a peer's last wait
            ub_overlap.abort(group)
            dist.destroy_process_group(group)
            torch.compiler.reset()  # compiled graphs hold names of groups
        group = dist.new_group()
        return _compile_block(group)(*args)

    return _tensor_parallel(device, renew_and_run)


def _compile_block(group: Any) -> Callable[..., Tensor]:
    def forward(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        hidden = torch.relu(funcol.all_gather_tensor_autograd(x, 0, group) @ up)
        return funcol.reduce_scatter_tensor_autograd(hidden @ down, "sum", 0, group)

    return torch.compile(forward, backend="ub_overlap", options=OPTIONS, fullgraph=True)


def _tensor_parallel(device: torch.device, forward: Callable[..., Tensor]) -> Program:
    ranks, sizes = dist.get_world_size(), [(WIDTH, HIDDEN), (HIDDEN, WIDTH)]
    parameters = [_random(device, WIDTH, HIDDEN // ranks), _random(device, HIDDEN // ranks, WIDTH)]

    def run(x: Tensor) -> None:
        forward(own_rows(x), *parameters).square().sum().backward()

    def loss(wholes: Sequence[Tensor], x: Tensor) -> Tensor:
        return (torch.relu(x @ wholes[0]) @ wholes[1]).square().sum()

    return Program(parameters, run, sizes, (1, 0), loss)


def make_hierarchical(device: torch.device) -> Program:
    """Return a layer whose weights are gathered over two hosts of two ranks, level by level."""
    ub_overlap.configure(hosts=HOSTS["two hosts"])
    group: Any = dist.group.WORLD
    shard = _random(device, 4, WIDTH)

    def forward(x: Tensor, shard: Tensor) -> Tensor:
        return torch.tanh(x @ funcol.all_gather_tensor_autograd(shard, 0, group).t())

    options = {**OPTIONS, "overrides": {"*": "split"}, "hierarchical": "force", "coalesce": "off"}
    compiled = torch.compile(forward, backend="ub_overlap", options=options, fullgraph=True)

    def run(x: Tensor) -> None:
        compiled(own_rows(x), shard).square().sum().backward()

    def loss(wholes: Sequence[Tensor], x: Tensor) -> Tensor:
        return torch.tanh(x @ wholes[0].t()).square().sum()

    return Program([shard], run, [(4 * dist.get_world_size(), WIDTH)], [0], loss)


def make_fully_sharded(device: torch.device) -> Program:
    """Return blocks whose weights `fully_shard` gathers, by our collectives."""
    model: nn.Module = nn.Sequential(*(fully_shard(Block().to(device)) for _ in range(BLOCKS)))
    ub_overlap.fsdp.install(fully_shard(model))
    return _data_parallel(model, 0)


def make_replicated(device: torch.device) -> Program:
    """Return blocks whose gradients DistributedDataParallel averages, by our hook."""
    model = DistributedDataParallel(nn.Sequential(*(Block() for _ in range(BLOCKS))).to(device), bucket_cap_mb=0.004)
    ub_overlap.ddp.install(model)
    return _data_parallel(model, None)


def _data_parallel(model: nn.Module, dim: int | None) -> Program:
    ranks, (sizes, output) = dist.get_world_size(), _on_one_process(BLOCKS)

    def run(x: Tensor) -> None:
        model(own_rows(x)).square().sum().backward()

    def loss(wholes: Sequence[Tensor], x: Tensor) -> Tensor:
        return output(wholes, x).square().sum() / ranks  # the mean over ranks

    return Program(list(model.parameters()), run, sizes, [dim] * len(sizes), loss)


def make_pipeline(device: torch.device) -> Program:
    """Return a stage of the schedule 1F1B, one a rank, whose messages take our channels."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model, (sizes, output) = Block().to(device), _on_one_process(ranks)
    stage = PipelineStage(model, rank, ranks, device, group=ub_overlap.pipeline.make_group())
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)

    def run(x: Tensor) -> None:
        schedule.step(*((x,) if rank == 0 else ()), **({"target": torch.zeros_like(x)} if rank == ranks - 1 else {}))

    def loss(wholes: Sequence[Tensor], x: Tensor) -> Tensor:
        return output(wholes, x).square().mean()

    parameters = list(model.parameters())
    held = range(rank * len(parameters), (rank + 1) * len(parameters))
    return Program(parameters, run, sizes, [None] * len(sizes), loss, held)


def _on_one_process(blocks: int) -> tuple[list[torch.Size], Callable[..., Tensor]]:
    """Return the sizes of the parameters of `blocks`, and a function of such parameters and a batch that runs them."""
    model = nn.Sequential(*(Block() for _ in range(blocks)))
    named = dict(model.named_parameters())

    def output(wholes: Sequence[Tensor], x: Tensor) -> Tensor:
        return functional_call(model, dict(zip(named, wholes, strict=True)), (x,))

    return [p.shape for p in named.values()], output


def _random(device: torch.device, *size: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*size, device=device) / 4)


PROGRAMS: dict[str, Callable[[torch.device], Program]] = {
    "compiled step": make_compiled,
    "FSDP2 step": make_fully_sharded,
    "DDP step": make_replicated,
    "two hosts": make_hierarchical,
    "pipeline step": make_pipeline,
    "recovery": make_renewed,
}
STEPS = tuple(name for name in PROGRAMS if name != "recovery")
"""Those that are kinds of the fault matrix. In a recovery, c10d waits for lost ranks."""
RANKS = {"two hosts": 4, "pipeline step": 3}
"""The ranks of those that need a number of them."""
HOSTS = {"two hosts": "0,0,1,1"}
"""The setting `hosts` of those that have one."""


def make_step(kind: str, device: torch.device) -> Callable[[], list[Tensor]]:
    """Return a function that runs a step and returns this rank's gradients: the same in every call, unless a rank is lost."""
    program, x = PROGRAMS[kind](device), torch.randn(ROWS * dist.get_world_size(), WIDTH, device=device)
    return lambda: program.gradients(x)

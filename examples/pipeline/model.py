"""A residual MLP cut into pipeline stages, with optional sequence parallelism inside each stage."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import ub_overlap

SEQUENCE = Shard(1)
"""Activations [B, S, D] are split along S."""
SPLIT_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
"""Schedules that compute the gradient of a stage's input (I) and those of its weights (W) at different times."""


class ResidualMlp(nn.Module):
    """x + down(gelu(up(norm(x)))), [B, S, D] -> [B, S, D]."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class StageModule(nn.Module):
    """Consecutive blocks. With a mesh of several ranks, inputs and outputs are this rank's part of the sequence."""

    def __init__(self, blocks: dict[str, ResidualMlp], mesh: DeviceMesh | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict(blocks)
        self.mesh = mesh
        for block in blocks.values() if mesh is not None else ():
            plan: dict[str, ParallelStyle] = {
                "norm": SequenceParallel(),
                "up": ColwiseParallel(input_layouts=SEQUENCE),
                "down": RowwiseParallel(output_layouts=SEQUENCE, use_local_output=False),
            }
            parallelize_module(block, mesh, plan)

    def forward(self, x: Tensor) -> Tensor:
        if self.mesh is not None:
            x = DTensor.from_local(x, self.mesh, [SEQUENCE])
        for block in self.blocks.values():
            x = block(x)
        return x.to_local() if isinstance(x, DTensor) else x


def make_blocks(count: int, width: int, hidden: int, device: torch.device, seed: int = 0) -> dict[str, ResidualMlp]:
    """Return all blocks, equal on all ranks."""
    torch.manual_seed(seed)
    return {str(i): ResidualMlp(width, hidden).to(device) for i in range(count)}


def stages_of_rank(schedule: str, rank: int, ranks: int) -> list[int]:
    """Return the numbers of the stages of a pipeline rank: one, two in a loop, or two in a V."""
    if schedule in ("ZBVZeroBubble", "DualPipeV"):
        return [rank, 2 * ranks - 1 - rank]
    return [rank, rank + ranks] if schedule.startswith(("Interleaved", "Looped")) else [rank]


def build_stages(
    blocks: dict[str, ResidualMlp],
    schedule: str,
    mesh: DeviceMesh,
    device: torch.device,
    compiled: bool,
    options: dict[str, object],
    data_parallel: str = "fsdp",
) -> list[PipelineStage]:
    """Return this rank's stages. `mesh`: dims "pp", "dp" and "tp". Messages go through ub_overlap's channels.

    `data_parallel`: "fsdp" or "ddp", for several ranks of "dp". With the option defer_weight_gradients the stages are
    `ub_overlap.pipeline.Stage`, which sends before weight gradients. So are compiled stages of schedules that split backward:
    without the option, their first part computes all gradients.
    """
    rank, ranks = mesh["pp"].get_local_rank(), mesh["pp"].size()
    own = stages_of_rank(schedule, rank, ranks)
    count = ranks * len(own)
    per_stage = len(blocks) // count
    if per_stage * count != len(blocks):
        raise ValueError(f"{len(blocks)} blocks on {count} stages: expected a multiple")
    group = ub_overlap.pipeline.make_group(mesh["pp"])
    needs_own_stage = options.get("defer_weight_gradients", False) or schedule in SPLIT_BACKWARD
    stage_class = ub_overlap.pipeline.Stage if compiled and needs_own_stage else PipelineStage
    stages: list[PipelineStage] = []
    for index in own:
        held = {name: blocks[name] for name in list(blocks)[index * per_stage : (index + 1) * per_stage]}
        module: nn.Module = StageModule(held, mesh["tp"] if mesh["tp"].size() > 1 else None)
        if compiled:
            module.compile(backend="ub_overlap", options=options)
        if mesh["dp"].size() > 1:
            module = share_data(module, mesh["dp"], data_parallel)
        stages.append(stage_class(module, index, count, device, group=group))
    return stages


def share_data(module: nn.Module, mesh: DeviceMesh, kind: str) -> nn.Module:
    """Return a stage's module whose gradients are averaged over `mesh`, once per step."""
    if kind == "fsdp":
        fully_shard(module, mesh=mesh)  # in place
        return module
    if any(isinstance(p, DTensor) for p in module.parameters()):
        raise ValueError("DDP within tensor parallelism: expected --tp 1, or --data-parallel fsdp")
    return DistributedDataParallel(module, process_group=mesh.get_group())


def names_of_blocks(stage: PipelineStage) -> list[str]:
    """Return the names of a stage's blocks."""
    module: Any = stage.submod.module if isinstance(stage.submod, DistributedDataParallel) else stage.submod
    return list(module.blocks)

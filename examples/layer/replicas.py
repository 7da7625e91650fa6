"""Data-parallel replicas of tensor-parallel layers: DistributedDataParallel and DTensor in one model.

DistributedDataParallel copies gradients into flat buckets, which is impossible for DTensors. So `LocalParameters` owns the
parameters as plain tensors, this rank's shards, and wraps them as DTensors at each call. That costs nothing in a compiled
graph, and the optimizer works on plain tensors. The gradient of a replicated parameter with a sharded input (LayerNorm) is
summed over ranks in the backward graph.

Modes of torch.compile under DistributedDataParallel, in either order of the two:

- "ddp_optimizer", torch's default, splits the graph at the boundaries of gradient buckets (1 MiB and more) before the backend
  runs. DTensor graphs fail then: torch 2.13 raises under any backend ("expected all tensors_saved_with_vc_check to be
  Tensors": the mesh is an input of the graph). Graphs of plain tensors work. Each part has its own plan; a boundary between an
  all_gather and its matmul leaves the all_gather alone, with the reason no_matmul.
- "no_optimization" (also written optimize_ddp=False), the default of the example, keeps a model in one graph, so all sites are
  found, in either order. Gradients are averaged after backward, not concurrently.
- "python_reducer" traces the averaging into backward with compiled autograd. All sites are found.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.nn.parallel import DistributedDataParallel

from ub_overlap import DDPGraphs, optimize_ddp


class LocalParameters(nn.Module):
    """A module with `model`'s DTensor parameters as this rank's shards (the same memory)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._hidden = [model]  # in a list, so it is not a submodule and its DTensors are not parameters of this module
        self._layouts: list[tuple[str, str, DeviceMesh, tuple[Placement, ...], torch.Size, tuple[int, ...]]] = []
        for name, parameter in model.named_parameters():
            if not isinstance(parameter, DTensor):
                raise TypeError(f"parameter {name} is a {type(parameter).__name__}, expected a DTensor: add it to the plan")
            local = name.replace(".", "__")
            self.register_parameter(local, nn.Parameter(parameter.detach().to_local()))
            self._layouts.append(
                (name, local, parameter.device_mesh, tuple(parameter.placements), parameter.shape, parameter.stride())
            )

    def forward(self, *args: Tensor) -> Tensor:
        parameters: dict[str, Tensor] = {
            name: DTensor.from_local(
                getattr(self, local), mesh, placements, run_check=False, shape=shape, stride=stride
            )
            for name, local, mesh, placements, shape, stride in self._layouts
        }  # fmt: skip
        return torch.func.functional_call(self._hidden[0], parameters, args)


def build(
    model: LocalParameters, mesh: DeviceMesh, *, options: dict[str, Any], order: str, graphs: DDPGraphs, bucket_mb: float
) -> tuple[Callable[..., Tensor], DistributedDataParallel | None]:
    """Return (callable, its DDP): `model` compiled, and averaged over mesh["dp"] if that has several ranks.

    `order`: "outside" DDP(compile(model)), "inside" compile(DDP(model)). `graphs`: see the docstring above.
    """
    if mesh["dp"].size() == 1:
        return cast(Callable[..., Tensor], torch.compile(model, backend="ub_overlap", options=options)), None
    optimize_ddp(graphs)
    inner = torch.compile(model, backend="ub_overlap", options=options) if order == "outside" else model
    ddp = DistributedDataParallel(cast(nn.Module, inner), process_group=mesh.get_group("dp"), bucket_cap_mb=bucket_mb)
    if order == "outside":
        return ddp, ddp
    return cast(Callable[..., Tensor], torch.compile(ddp, backend="ub_overlap", options=options)), ddp

"""Data parallel replicas of tensor parallel layers: DistributedDataParallel and DTensor in one model.

DistributedDataParallel copies gradients into flat buckets and cannot do that with DTensors. `LocalParameters` therefore owns a
model's parameters as what they are in memory, a rank's own shards, and makes DTensors of them when it is called. That costs
nothing in a compiled graph, and the optimizer works on plain tensors. A replicated parameter whose gradient is a sum over the
ranks' shares (LayerNorm's, whose input is sharded) is summed in the backward graph.

What torch.compile does under DistributedDataParallel, in either order of the two:

- "ddp_optimizer", torch's default, splits the graph at the borders of gradient buckets (1 MiB and more) before a backend sees
  it. DTensor graphs do not survive that: torch 2.13 fails under any backend ("expected all tensors_saved_with_vc_check to be
  Tensors": the mesh is an input of the graph). Graphs of plain tensors do, each piece gets a plan of its own, but a border
  between an all_gather and its matmul parts the two: the all_gather is then left alone, with the reason no_matmul.
- "no_optimization" (also written optimize_ddp=False), what the example takes, keeps a model in one graph, so all sites are
  found, in either order. Gradients are averaged when backward is done, not beside it.
- "python_reducer" traces the averaging into backward by compiled autograd. All sites are found as well.
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
    """`model`, whose parameters are DTensors, as a module whose parameters are this rank's shards (the same memory)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._hidden = [model]  # in a list: not a submodule, so that its DTensors are no parameters of this one
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
        whole: dict[str, Tensor] = {
            name: DTensor.from_local(
                getattr(self, local), mesh, placements, run_check=False, shape=shape, stride=stride
            )
            for name, local, mesh, placements, shape, stride in self._layouts
        }  # fmt: skip
        return torch.func.functional_call(self._hidden[0], whole, args)


def build(
    model: LocalParameters, mesh: DeviceMesh, *, options: dict[str, Any], order: str, graphs: DDPGraphs, bucket_mb: float
) -> tuple[Callable[..., Tensor], DistributedDataParallel | None]:
    """(what to call, its DDP): `model` compiled, and averaged over mesh["dp"] where that has more than one rank.

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

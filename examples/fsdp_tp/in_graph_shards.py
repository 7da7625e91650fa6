"""ZeRO-3 in the graph: parameters are shards, and reading one gathers it.

    forward     shard -> cast -> all_gather -> weight -> matmul
    backward    gradient of the weight -> cast -> reduce_scatter -> gradient of the shard
    HSDP        gradient of the weight -> cast -> all_reduce -> reduce_scatter -> gradient of the shard

torch.compile traces both collectives, so the backend places them: a gather starts before its weight is needed, a
reduction finishes after its gradient was computed. fully_shard (FSDP2) gathers in hooks, which are not traced.

State dicts, gradient clipping and optimizers see the shards as DTensors, under the names that the parameters had.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard


@dataclass(frozen=True, slots=True)
class GatherConfig:
    """How parameters are gathered."""

    tp_mesh: DeviceMesh | None = None
    """The mesh of the tensor-parallel parameters, the first dim of the shards' mesh; None without any."""
    param_dtype: torch.dtype | None = None
    """The type of gathered parameters; None: that of the shards."""
    reduce_dtype: torch.dtype | None = None
    """The type in which gradients are reduced; None: that of the gradients."""

    def gather(self, shard: DTensor) -> Tensor:
        """Return the whole parameter, with tensor parallelism this rank's part of it as a DTensor over `tp_mesh`."""
        tp = shard.placements[: 0 if self.tp_mesh is None else 1]
        data_dims = shard.device_mesh.ndim - len(tp)
        whole = shard.redistribute(
            placements=[*tp, *[Replicate()] * data_dims], forward_dtype=self.param_dtype, backward_dtype=self.reduce_dtype
        )
        local = whole.to_local(grad_placements=[*tp, *[Partial("avg")] * data_dims])
        return local if self.tp_mesh is None else DTensor.from_local(local, self.tp_mesh, tp, run_check=False)


def shard_parameters(
    model: nn.Module,
    mesh: DeviceMesh,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> None:
    """Shard each parameter of `model` over the last dim of `mesh`, in place.

    `mesh`: its first dim is named "tp" after tensor parallelism over it. A dim between replicates the shards (HSDP). Ranks of
    the other dims have batches of their own; gradients are averaged over them. Call it on all ranks, before the optimizer is
    made.
    """
    is_tensor_parallel = (mesh.mesh_dim_names or ("",))[0] == "tp"
    config = GatherConfig(mesh["tp"] if is_tensor_parallel else None, param_dtype, reduce_dtype)
    for module in list(model.modules()):
        names = [name for name, _ in module.named_parameters(recurse=False)]
        for name in names:
            parameter = module._parameters[name]
            assert parameter is not None
            module.register_parameter(name, _shard(parameter, mesh))
        if names:
            module.gather_config = config  # type: ignore[assignment]
            module.__class__ = _gathering_class(type(module), tuple(names))


def _shard(parameter: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    """Return this rank's shard along dim 0 of the tensor-parallel part of `parameter`."""
    tp = parameter.placements if isinstance(parameter, DTensor) else ()
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    replicated = [*tp, *[Replicate()] * (mesh.ndim - len(tp))]
    whole = DTensor.from_local(local.detach(), mesh, replicated, run_check=False)
    return nn.Parameter(whole.redistribute(placements=[*replicated[:-1], Shard(0)]), requires_grad=parameter.requires_grad)


@functools.cache
def _gathering_class(base: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """Return a subclass of `base` whose attributes `names` gather the parameters. One per class: graphs are reused."""
    return type(base.__name__, (base,), {name: _gathered_parameter(name) for name in names})


def _gathered_parameter(name: str) -> Any:
    def read(module: nn.Module) -> Tensor:
        return module.gather_config.gather(module._parameters[name])  # type: ignore[operator,union-attr]

    return property(read)

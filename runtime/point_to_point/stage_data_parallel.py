"""Data parallelism of a stage whose weight gradients come after its input gradients.

                           microbatches                                  behind the last weight gradients of a step
none                       gradients are accumulated                     nothing
DistributedDataParallel    gradients are accumulated, nothing is sent    the hooks of all parameters run: buckets are reduced
fully_shard                gradients of whole parameters are             torch reduces them (perform_reduce_grad)
                           accumulated in the reduce dtype
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from ub_overlap import _fsdp_compat

from .. import errors
from ..deferred_gradients import DeferredGradients, join, pass_to


class GradientSync:
    """Accumulates the deferred gradients of a stage's module. This class: of a module without data parallelism."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def parameters(self) -> Iterable[Tensor]:
        """Return the tensors whose gradients a backward accumulates."""
        return self.module.parameters()

    def without_reduction(self) -> AbstractContextManager[None]:
        """Return a context for a forward whose backward reduces nothing."""
        return nullcontext()

    def run(self, deferred: DeferredGradients, is_last: bool) -> None:
        """Compute deferred gradients and accumulate them. `is_last`: no others of this step follow."""
        deferred.run()


class _BucketSync(GradientSync):
    """Of DistributedDataParallel, whose last microbatch runs without synchronization, as the others."""

    def __init__(self, module: DistributedDataParallel) -> None:
        super().__init__(module)
        self._data_parallel = module

    def without_reduction(self) -> AbstractContextManager[None]:
        return self._data_parallel.no_sync()

    def run(self, deferred: DeferredGradients, is_last: bool) -> None:
        if is_last:
            later = deferred.parameters()
            ids = set(map(id, later))
            complete = [p for p in self.module.parameters() if p.grad is not None and id(p) not in ids]
            # The search for unused parameters begins at this tensor.
            self._data_parallel.reducer.prepare_for_backward([join([*complete, *later])] if complete or later else [])
            pass_to(complete, [None] * len(complete))
        deferred.run()  # the gradients of a graph are reduced while the next graph computes


class _ShardSync(GradientSync):
    """Of fully_shard."""

    def parameters(self) -> Iterable[Tensor]:
        return [*self.module.parameters(), *(p for group in self._groups() for p in _fsdp_compat.unsharded_parameters(group))]

    def run(self, deferred: DeferredGradients, is_last: bool) -> None:
        if deferred.reads_freed_memory():  # forwards between the two parts have resharded
            for module in _sharded(self.module):
                module.unshard()
        deferred.run()
        for group in self._groups():
            _fsdp_compat.accumulate_in_reduce_dtype(group)

    def _groups(self) -> list[Any]:
        return [group for module in _sharded(self.module) for group in _fsdp_compat.param_groups(module)]


def _sharded(module: nn.Module) -> list[Any]:
    return [m for m in module.modules() if isinstance(m, FSDPModule)]


def gradient_sync(module: nn.Module) -> GradientSync:
    """Return what accumulates deferred gradients of `module`. OptionError where torch cannot accumulate over microbatches."""
    if isinstance(module, DistributedDataParallel) and module.static_graph:
        raise errors.OptionError(
            "DistributedDataParallel with static_graph reduces no gradient of a pipeline's stage",
            where="ub_overlap.pipeline.Stage",
            got="static_graph=True",
            fix="wrap the stage's module with static_graph=False",
        )
    parts = [m for m in module.modules() if m is not module and isinstance(m, DistributedDataParallel)]
    if not isinstance(module, FSDPModule):
        parts += [m for m in _sharded(module) if m is not module]
    if parts:
        kind = "fully_shard" if isinstance(parts[0], FSDPModule) else "DistributedDataParallel"
        raise errors.OptionError(
            f"{kind} is applied to parts of a stage only: each microbatch would reduce gradients",
            where="ub_overlap.pipeline.Stage",
            got=f"a {type(module).__name__} with {len(parts)} such modules in it",
            fix=f"apply {kind} to the stage's module too" if kind == "fully_shard" else f"wrap the whole module in {kind}",
        )
    if isinstance(module, DistributedDataParallel):
        return _BucketSync(module)
    return _ShardSync(module) if isinstance(module, FSDPModule) else GradientSync(module)

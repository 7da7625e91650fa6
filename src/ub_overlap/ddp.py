"""DistributedDataParallel over ub_overlap's transport: `ub_overlap.ddp.install(model)`, a communication hook."""

from __future__ import annotations

from ub_overlap.runtime.data_parallel.ddp import HookState, all_reduce_hook, install

__all__ = ["HookState", "all_reduce_hook", "install"]

"""fully_shard (FSDP2) over ub_overlap's transport: `ub_overlap.fsdp.install(model)`."""

from __future__ import annotations

from ub_overlap.runtime.data_parallel.fsdp import Installation, install

__all__ = ["Installation", "install"]

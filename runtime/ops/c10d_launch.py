"""Start collectives of c10d. Handles have `wait(timeout)`, which raises RuntimeError after that time, and `is_completed`."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch import Tensor

from ub_overlap import _torch_compat as compat


def start_all_gather(out: Tensor, shard: Tensor, group: str) -> Any:
    """Gather `shard` [s, ...] of all ranks into `out` [R * s, ...]."""
    return compat.start_all_gather(out, shard, group)


def start_reduce_scatter(out: Tensor, full: Tensor, group: str) -> Any:
    """Sum `full` [R * s, ...] over the ranks, and put the shard of this rank into `out` [s, ...]."""
    return compat.start_reduce_scatter(out, full, group) if full.is_cuda else _HostReduceScatter(out, full, group)


def start_all_reduce(tensor: Tensor, group: str) -> Any:
    """Sum `tensor` over the ranks, in place."""
    return compat.group_of(group).allreduce([tensor])


class _HostReduceScatter:
    """A reduce_scatter by the all_reduce that gloo itself runs for it. gloo's handle of it waits without a timeout."""

    def __init__(self, out: Tensor, full: Tensor, group: str) -> None:
        self._out, self._total = out, full.clone()
        self._rank, self._work = compat.group_of(group).rank(), start_all_reduce(self._total, group)

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self, *timeout: timedelta) -> None:
        """Wait, at most `timeout`, and fill the result."""
        self._work.wait(*timeout)
        rows = self._out.shape[0]
        self._out.copy_(self._total[self._rank * rows : (self._rank + 1) * rows])

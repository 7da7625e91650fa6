"""Multiprocessors that matmuls leave to NCCL between start and finish of a collective that it runs.

On Hopper GPUs a large matmul is a persistent kernel: one block for each multiprocessor, which stays until the matmul ends.
NCCL's kernel then starts when the matmul ends, and where NCCL is there first, some blocks of the matmul run after the others.
So kernels that are launched meanwhile get fewer blocks, if they read torch's carve-out (setting `nccl_multiprocessors`). torch
has one number for this in a process. A number that the program has set stays.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from ub_overlap import _torch_compat as compat
from ub_overlap._c10d_compat import uses_nccl

from .. import settings

LARGEST_SHARE = 4
"""Of a GPU's multiprocessors a fourth is left at most."""
_PERSISTENT = (9, 0)
"""The compute capability from which on matmuls are persistent kernels."""


class _Carveout:
    """torch's carve-out while collectives are open."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a token may be freed by a garbage collection within `begin`
        self._open = 0
        self._count = 0  # what was set here, 0 for nothing

    def begin(self, count: int) -> None:
        with self._lock:
            self._open += 1
            if not self._count and compat.get_carveout() is None:
                compat.set_carveout(count)
                self._count = count

    def end(self) -> None:
        with self._lock:
            self._open -= 1
            if self._open or not self._count:
                return
            if compat.get_carveout() == self._count:
                compat.set_carveout(None)
            self._count = 0


_carveout = _Carveout()


def spare(token: Tensor, count: int) -> Callable[[], object]:
    """Let matmuls leave `count` multiprocessors, 0 for none, until what it returns is called, once or more.

    Also until the collective's token is freed: then no finish can follow.
    """
    if not count:
        return _nothing
    _carveout.begin(count)
    return weakref.finalize(token, _carveout.end)


def _nothing() -> None:
    """End nothing."""


def multiprocessors_for(group: str, device: torch.device) -> int:
    """Return how many multiprocessors matmuls leave while the group's collective runs on `device`: 0 unless NCCL runs it."""
    count = settings.current().nccl_multiprocessors
    if not count or device.type != "cuda" or not uses_nccl(compat.group_of(group)):
        return 0
    return min(count, _most_of(device))


@functools.cache
def _most_of(device: torch.device) -> int:
    """Return how many multiprocessors matmuls of a GPU can leave at most."""
    if not compat.has_carveout() or torch.cuda.get_device_capability(device) < _PERSISTENT:
        return 0
    return int(torch.cuda.get_device_properties(device).multi_processor_count) // LARGEST_SHARE

"""Multiprocessors that matmuls leave to NCCL between start and finish of a collective that it runs.

On Hopper GPUs a large matmul is a persistent kernel: one block for each multiprocessor, which stays until the matmul ends.
NCCL's kernel then starts when the matmul ends, and where NCCL is there first, some blocks of the matmul run after the others.
So kernels that are launched meanwhile get fewer blocks, if they read torch's carve-out (setting `nccl_multiprocessors`). torch
has one number for this in a process. A number that the program has set stays.
"""

from __future__ import annotations

import itertools
import threading
import weakref

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
    """torch's carve-out while collectives are open. `count`: what was set here, 0 for nothing."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a token may be freed by a garbage collection within `begin`
        self._open: set[int] = set()
        self._count = 0

    def begin(self, key: int, count: int) -> None:
        with self._lock:
            self._open.add(key)
            if not self._count and compat.get_carveout() is None:
                compat.set_carveout(count)
                self._count = count

    def end(self, key: int) -> None:
        with self._lock:
            self._open.discard(key)
            if self._open or not self._count:
                return
            if compat.get_carveout() == self._count:
                compat.set_carveout(None)
            self._count = 0


_carveout = _Carveout()
_keys = itertools.count(1)


def spare(token: Tensor, count: int) -> int:
    """Let matmuls leave `count` multiprocessors, 0 for none, until `use_all` of the key that it returns.

    Also until the collective's token is freed: then no finish can follow.
    """
    key = next(_keys)
    if count:
        _carveout.begin(key, count)
        weakref.finalize(token, _carveout.end, key)
    return key


def use_all(key: int) -> None:
    """Let matmuls use all multiprocessors again, unless another collective is open."""
    _carveout.end(key)


def multiprocessors_for(group: str, device: torch.device) -> int:
    """Return how many multiprocessors matmuls leave while the group's collective runs on `device`: 0 unless NCCL runs it."""
    count = settings.current().nccl_multiprocessors
    if not count or device.type != "cuda" or not compat.has_carveout() or not uses_nccl(compat.group_of(group)):
        return 0
    if torch.cuda.get_device_capability(device) < _PERSISTENT:
        return 0
    return min(count, torch.cuda.get_device_properties(device).multi_processor_count // LARGEST_SHARE)

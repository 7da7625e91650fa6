"""Identify the module of a call by its weight, where one graph serves several modules."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ub_overlap import _torch_compat as compat


class ModuleNumbers:
    """The weights of the modules that one graph serves, numbered by first appearance.

    Weights are not kept alive. The number of a freed weight goes to the next new one: memory that was freed and allocated
    again is not a further module."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._entries: list[tuple[tuple[Any, ...], Any, int]] = []
        self._arrivals = itertools.count()

    def find(self, weight: Tensor) -> tuple[int, int] | None:
        """Return (module number, how many weights arrived before), or None if the weight is new."""
        number = self._numbers.get((compat.storage_id(weight), weight.storage_offset()))
        if number is None or self._entries[number][1].expired():  # the address now belongs to another weight
            return None
        return number, self._entries[number][2]

    def add(self, weight: Tensor) -> tuple[int, int]:
        """Add a weight that `find` does not know; return the same pair."""
        entry = (compat.storage_id(weight), weight.storage_offset()), compat.weak_storage(weight), next(self._arrivals)
        number = next((i for i, (_, ref, _) in enumerate(self._entries) if ref.expired()), len(self._entries))
        if number < len(self._entries):
            self._numbers.pop(self._entries[number][0], None)
            self._entries[number] = entry
        else:
            self._entries.append(entry)
        self._numbers[entry[0]] = number
        return number, entry[2]


def is_capture_copy(weight: Tensor) -> bool:
    """Return whether `weight` is in the memory pool of the CUDA graph that is being captured.

    That pool holds the copies that torch makes of a graph's inputs, and no module's own weight. False if the allocator cannot
    report it."""
    probe = torch.empty(1, device=weight.device)  # a new allocation is in that pool
    try:
        segments = torch.cuda.memory_snapshot()  # reads only the host's allocator state
    except RuntimeError:  # an allocator without snapshots
        return False
    capture_pool, weight_pool = (_pool(tensor.untyped_storage().data_ptr(), segments) for tensor in (probe, weight))
    return capture_pool == weight_pool and capture_pool not in (None, (0, 0))


def _pool(address: int, segments: Sequence[dict[str, Any]]) -> tuple[int, ...] | None:
    """Return the memory pool of an address, (0, 0) for the shared default pool; None if unknown."""
    for segment in segments:
        if 0 <= address - segment["address"] < segment["total_size"]:
            return tuple(segment["segment_pool_id"]) if "segment_pool_id" in segment else None
    return None

"""Which module a call is of, where one graph serves many: their weights tell."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ub_overlap import _torch_compat as compat


class Weights:
    """The weights that calls of one graph came with, numbered in the order of their first appearance. They are not kept alive,
    and the number of one that is gone goes to the next that is new: memory that was freed and made again is no other module."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._known: list[tuple[tuple[Any, ...], Any, int]] = []
        self._came = itertools.count()

    def find(self, weight: Tensor) -> tuple[int, int] | None:
        """(its number, how many weights had come before it)."""
        number = self._numbers.get((compat.storage_id(weight), weight.storage_offset()))
        if number is None or self._known[number][1].expired():  # another's memory, at the same place
            return None
        return number, self._known[number][2]

    def add(self, weight: Tensor) -> tuple[int, int]:
        """The same, of one that is not found."""
        entry = (compat.storage_id(weight), weight.storage_offset()), compat.weak_storage(weight), next(self._came)
        number = next((i for i, (_, ref, _) in enumerate(self._known) if ref.expired()), len(self._known))
        if number < len(self._known):
            self._numbers.pop(self._known[number][0], None)
            self._known[number] = entry
        else:
            self._known.append(entry)
        self._numbers[entry[0]] = number
        return number, entry[2]


def made_for_capture(weight: Tensor) -> bool:
    """While a CUDA graph is captured: does `weight` lie in that graph's own memory? There the copies are that torch makes of
    what a graph takes, and no module's weight. False where nobody can tell."""
    here = torch.empty(1, device=weight.device)  # what is allocated now lies there
    try:
        segments = torch.cuda.memory_snapshot()  # asks the allocator of the host alone
    except RuntimeError:  # an allocator that keeps no such books
        return False
    ours, its = (_pool(tensor.untyped_storage().data_ptr(), segments) for tensor in (here, weight))
    return ours == its and ours not in (None, (0, 0))


def _pool(address: int, segments: Sequence[dict[str, Any]]) -> tuple[int, ...] | None:
    """The memory pool that an address is of, (0, 0) for the one that all share; None where it is unknown."""
    for segment in segments:
        if 0 <= address - segment["address"] < segment["total_size"]:
            return tuple(segment["segment_pool_id"]) if "segment_pool_id" in segment else None
    return None

"""The arena of a CUDA group: slots and flag words in torch's symmetric memory, texts and process ids in shared memory.

torch allocates and exchanges the memory (`rendezvous`, a collective without a deadline of its own: an exchange with one goes
before it, so that it begins when all ranks are there). No NVLink multicast is asked for.

    words    flag words and abort word of every rank (csrc/cuda/state.h); zero before any rank uses them; never replaced
    slots    two a rank; replaced by bigger ones when a call needs more. Graphs hold addresses: what they saw is kept
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from ub_overlap import _torch_compat

from . import errors

_SLOTS = 2


def gpu() -> str:
    """The current device, by a name that all processes of the host give it."""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def unreachable(gpus: Sequence[str], rank: int) -> list[int]:
    """Ranks whose device this rank's cannot address. Devices that this process does not see are left to the rendezvous."""
    here = torch.cuda.current_device()
    seen = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    return [
        other
        for other, name in enumerate(gpus)
        if other != rank and name in seen and not torch.cuda.can_device_access_peer(here, seen[name])
    ]


def reason(gpus: Sequence[str], cannot: Sequence[Sequence[int]]) -> str | None:
    """Why these ranks cannot share an arena, in the same words on all of them; None where they can."""
    for rank, name in enumerate(gpus):
        if name in gpus[:rank]:
            return (
                f"its ranks {gpus.index(name)} and {rank} are on one GPU ({name}), where one would wait for the other for ever"
            )
    for rank, others in enumerate(cannot):
        if others:
            return f"the GPU of its rank {rank} has no peer access to that of {errors.ranks_text(others)}"
    return None


def refuse_capture(doing: str) -> None:
    """Memory cannot be shared while a graph is captured."""
    if torch.cuda.is_current_stream_capturing():
        raise errors.ArenaError(
            f"cannot {doing} while a CUDA graph is captured",
            fix="run the same calls once before the capture, on all ranks",
        )


class SymmetricArena:
    """What `session.Session` sees of a CUDA arena; it grows by the same steps as a `ShmArena`. `core` is its C++ side."""

    def __init__(self, host: Any, group: str, rank: int, ranks: int, slot_bytes: int) -> None:
        from .extension import extension

        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        self._host, self._group, self._rank, self._ranks = host, group, rank, ranks
        self._slot_bytes = slot_bytes
        self._words = _allocate(extension().words_bytes(ranks))
        self._data = _allocate(_SLOTS * slot_bytes)
        self._held: list[Any] = []
        self._next: Any = None
        self._next_slot_bytes = 0
        self._next_pointers: list[int] | None = None
        self.core: Any = None

    def meet(self) -> None:
        """Collective, once all ranks have made theirs: exchange the pointers, and clear this rank's words."""
        from .extension import extension

        words, self._words_handle = self._rendezvous(self._words)
        data, self._data_handle = self._rendezvous(self._data)
        self._words.zero_()
        torch.cuda.synchronize()
        self.core = extension().CudaArena(
            device=torch.cuda.current_device(), host=self._host, words=words, data=data, slot_bytes=self._slot_bytes
        )

    @property
    def slot_bytes(self) -> int:
        return self._slot_bytes

    @property
    def data_name(self) -> str:
        return ""

    def check(self, op: str, site: str) -> None:
        """Raises when a rank of the group has given up, or is gone; `op` and `site` are what waits for it."""
        self._host.check(op, site)
        self.core.check()

    def grow_begin(self, slot_bytes: int) -> None:
        refuse_capture("make the landing area larger")
        self._next, self._next_slot_bytes, self._next_pointers = _allocate(_SLOTS * slot_bytes), slot_bytes, None
        torch.cuda.synchronize()  # nothing of ours is on its way any more, to us or to a peer

    def grow_attach(self, rank: int, name: str) -> None:
        if self._next_pointers is None:
            self._next_pointers, self._next_handle = self._rendezvous(self._next)

    def grow_commit(self) -> None:
        self.core.replace(data=self._next_pointers, slot_bytes=self._next_slot_bytes)
        if self.core.captured:
            self._held.append((self._data, self._data_handle))
        self._data, self._data_handle = self._next, self._next_handle
        self._slot_bytes, self._next, self._next_handle = self._next_slot_bytes, None, None

    def unlink(self) -> None:
        """Symmetric memory has no names that could stay behind."""

    def _rendezvous(self, tensor: torch.Tensor) -> tuple[list[int], Any]:
        handle = _torch_compat.symmetric_rendezvous(tensor, self._group)
        pointers = [int(pointer) for pointer in handle.buffer_ptrs]
        offset = tensor.data_ptr() - pointers[self._rank]  # of the tensor within its allocation, the same on all ranks
        if len(pointers) != self._ranks or not 0 <= offset < 1 << 30:
            raise errors.ArenaError(
                "torch's symmetric memory is laid out in a way that is not known",
                got=f"{len(pointers)} pointers, offset {offset}",
                expected=f"{self._ranks} pointers, and the tensor within its buffer",
            )
        return [pointer + offset for pointer in pointers], handle


def _allocate(size: int) -> torch.Tensor:
    return _torch_compat.symmetric_empty(size, torch.device("cuda", torch.cuda.current_device()))

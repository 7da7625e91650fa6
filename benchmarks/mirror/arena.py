"""The memory of a mirrored group: this process's own, and the other process's in the place of ranks 1 to R-1."""

from __future__ import annotations

from typing import Any

from ub_overlap import _torch_compat as compat
from ub_overlap.runtime import errors
from ub_overlap.runtime.extension import extension
from ub_overlap.runtime.session.symm_mem import SymmetricArena

from . import PROCESSES


class MirrorShmArena:
    """Shared memory of the CPU executor, and the hosts' part of an arena on GPUs. `core`: rank 0's `ShmArena` of R ranks."""

    def __init__(self, ranks: int, slot_bytes: int) -> None:
        self.core: Any = extension().ShmArena(rank=0, ranks=ranks, slot_bytes=slot_bytes)
        self.peers = range(1, ranks)
        self.check = self.core.check
        self.grow_begin, self.grow_commit, self.grow_abort = self.core.grow_begin, self.core.grow_commit, self.core.grow_abort
        self.stop_sharing, self.bytes_of_slot = self.core.stop_sharing, self.core.bytes_of_slot

    @property
    def slot_bytes(self) -> int:
        return int(self.core.slot_bytes)

    @property
    def addresses(self) -> dict[str, str]:
        """What the other process needs to attach."""
        return {"control": self.core.control_address, "data": self.core.data_address}

    @property
    def data_address(self) -> str:
        return str(self.core.data_address)

    def attach(self, addresses: dict[str, str]) -> None:
        """Map the other process's memory in the place of every peer."""
        for peer in self.peers:
            problem = self.core.attach(peer, addresses["control"], addresses["data"], made_as=0)
            if problem:
                raise errors.ArenaError("cannot map the memory of the other process", got=problem)

    def grow_attach(self, _rank: int, address: str) -> None:
        """Map the other process's larger slots in the place of every peer."""
        for peer in self.peers:
            self.core.grow_attach(peer, address)

    def check_site(self, slot: int) -> None:
        """Raise when the other process's call in this slot is at another site."""
        self.core.check_site(slot)


class MirrorSymmetricArena(SymmetricArena):
    """Symmetric memory of two processes, whose flag words are those of R ranks."""

    def __init__(self, host: MirrorShmArena, group: str, rank: int, slot_bytes: int) -> None:
        """`group`, `rank`: the c10d group of the two processes, and this one's rank in it."""
        super().__init__(host.core, group, rank, PROCESSES, slot_bytes)
        self._peers = host.peers
        self._words = compat.symmetric_empty(extension().words_bytes(len(host.peers) + 1), self._words.device)

    def _rendezvous(self, tensor: Any, name: str) -> tuple[list[int], Any]:
        """Return a pointer per rank of the mirrored group, and torch's handle."""
        pointers, handle = super()._rendezvous(tensor, name)
        return [pointers[self._rank], *(pointers[1 - self._rank] for _ in self._peers)], handle

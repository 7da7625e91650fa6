"""Landing memory for results that FSDP2 allocates before it gathers: a zero-copy gather into memory that it has already.

    allocate    a tensor over the landing memory of a split slot that nothing uses
    copy-in     FSDP writes this rank's part of it
    gather      start pushes that part to the same place at the peers; finish waits for theirs. No rank copies anything
    copy-out    FSDP reads it, and drops the tensor
    allocate    of the same slot: release tells the peers that they may push again

A slot is free when the storage of its tensor is freed, views included. That follows the program: FSDP drops a result in the
same place on all ranks, so all ranks choose the same slots. More results at once than slots get memory of torch's.

Release is issued in the stream of the next allocation. FSDP has made that stream wait for the copy-out before it drops a
result, as for memory of the caching allocator.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ub_overlap import _torch_compat as compat

from ..session.bind import find_session
from ..session.session import Session
from .eager_collectives import GATHERED_DTYPES, LANDING_SLOTS, OPS, as_gathered

_of_session: weakref.WeakKeyDictionary[Session, LandingSlots] = weakref.WeakKeyDictionary()


@dataclass
class _Slot:
    """A split slot. `storage`: weakly, of the tensor over it. `site`: of the gather that has used it and is not released."""

    number: int
    bytes: int = 0
    storage: Any = None
    address: int = 0
    site: str = ""
    allocated_on: Any = None
    finished: Any = None

    @property
    def is_free(self) -> bool:
        return self.storage is None or bool(self.storage.expired())


class LandingSlots:
    """The split slots of one session that hold results of FSDP2."""

    def __init__(self, group: str, device: torch.device) -> None:
        self._group, self._device = group, device
        self._slots = [_Slot(number) for number in LANDING_SLOTS]

    @staticmethod
    def of(group: str, device: torch.device) -> LandingSlots:
        """Return those of the session of `group`, which is bound."""
        session = find_session(group, device.type)
        assert session is not None, "the group is bound"
        if session not in _of_session:
            _of_session[session] = LandingSlots(group, device)
        return _of_session[session]

    def allocate(self, numel: int, dtype: torch.dtype, site: str) -> Tensor | None:
        """Return a tensor [numel] over landing memory, for the gather of `site`; None if all slots are in use."""
        size = numel * dtype.itemsize
        free = [slot for slot in self._slots if slot.is_free]
        if not free or size == 0:
            return None
        slot = min(free, key=lambda one: (max(0, size - one.bytes), one.bytes))
        self._release(slot)
        carrier = dtype if dtype in GATHERED_DTYPES else GATHERED_DTYPES[-1]
        like = torch.empty(0, dtype=carrier, device=self._device)
        out = OPS.landing_memory(like, size // carrier.itemsize, slot.number, self._group, site).view(dtype)
        slot.bytes = max(size, slot.bytes)
        slot.storage, slot.address, slot.allocated_on = compat.weak_storage(out), out.data_ptr(), self._stream()
        return out

    def gather(self, out: Tensor, shard: Tensor, site: str) -> bool:
        """Gather `shard`, this rank's part of `out`, if `out` is of `allocate`. Return whether it is."""
        slot = next((one for one in self._slots if one.address == out.data_ptr() and not one.is_free), None)
        if slot is None or slot.site:
            return False
        sent = as_gathered(shard)
        arguments = ("all_gather", "sum", sent.dtype, slot.number, True, "bulk", self._group, site)
        token = OPS.start_collective(sent, *arguments)
        OPS.finish_collective(token, sent, *arguments)
        slot.site = site
        slot.finished = None if self._device.type == "cpu" else torch.cuda.current_stream(self._device).record_event()
        return True

    @staticmethod
    def release_all_free(group: str) -> None:
        """Give back the free slots of all sessions of `group`. On all ranks."""
        for slots in list(_of_session.values()):
            if slots._group == group:
                slots.release_free()

    def release_free(self) -> None:
        """Give free slots back. On all ranks."""
        for slot in self._slots:
            if slot.is_free:
                self._release(slot)

    def _release(self, slot: _Slot) -> None:
        if not slot.site:
            return
        if self._device.type != "cpu":
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(slot.finished)  # of a result that was dropped without a wait
            if slot.allocated_on != stream:
                stream.wait_stream(slot.allocated_on)
        OPS.release_collective(torch.empty(1, device=self._device), slot.number, "bulk", self._group, slot.site)
        slot.site, slot.finished = "", None

    def _stream(self) -> Any:
        return None if self._device.type == "cpu" else torch.cuda.current_stream(self._device)

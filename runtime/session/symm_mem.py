"""The arena of a CUDA group: slots and flag words in torch's symmetric memory, texts and process ids in shared memory.

torch allocates and exchanges the memory (`rendezvous`, a collective without a deadline of its own: an exchange with one goes
before it, so that it begins when all ranks are there). No NVLink multicast is asked for.

    words    flag words and abort word of every rank (csrc/cuda/state.h); zero before any rank uses them; never replaced
    slots    two a rank; replaced by bigger ones when a call needs more. Graphs hold addresses: what they saw is kept

torch's memory waits for the whole device as it goes, without a deadline and with the interpreter's lock: it is let go of only
where the device is found at rest. Where that cannot be found out it stays until the process ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import torch

from ub_overlap import _torch_compat

from .. import errors, settings
from . import device_wait
from .daemon_thread import apart

log = logging.getLogger(__name__)

_SLOTS = 2
T = TypeVar("T")


def gpu() -> dict[str, Any]:
    """The current device: a name that all processes of the host give it, and what it is."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "uuid": str(properties.uuid),
        "name": properties.name,
        "capability": [properties.major, properties.minor],
    }


def label() -> str:
    """The current device in words, for the log."""
    index = torch.cuda.current_device()
    return f"cuda:{index} ({torch.cuda.get_device_name(index)})"


def links(uuids: Sequence[str], rank: int) -> dict[str, list[bool | None]]:
    """What this rank sees of the ranks' devices: "peer" access, and whether it goes over "nvlink". None: it cannot tell
    (a device that this process does not see, no NVML): the rendezvous will show."""
    here = torch.cuda.current_device()
    seen = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    by_torch, nvml = _torch_compat.nvlinks(), _Nvml()
    peer: list[bool | None] = []
    nvlink: list[bool | None] = []
    for other, uuid in enumerate(uuids):
        if other == rank or uuid == uuids[rank]:
            peer.append(True)
            nvlink.append(True)
            continue
        there = seen.get(uuid)
        peer.append(None if there is None else torch.cuda.can_device_access_peer(here, there))
        counted = None if by_torch is None or there is None else by_torch[here][there] > 0
        # Counting links by their far ends misses those through switches that a virtual machine does not see: that it counts
        # none is no proof, what NVML says of the pair is.
        nvlink.append(True if counted else nvml.nvlink(uuids[rank], uuid))
    return {"peer": peer, "nvlink": nvlink}


class _Nvml:
    """The driver's management library, as far as it is there. Everything it refuses is None."""

    _NVLINK = 2  # of nvmlGpuP2PCapsIndex_t
    _KNOWN = range(6)  # of nvmlGpuP2PStatus_t: 0 is good, 1 to 5 are reasons why not, beyond that it is unknown

    def __init__(self) -> None:
        self._library: Any = None
        with contextlib.suppress(OSError, AttributeError):
            library = ctypes.CDLL("libnvidia-ml.so.1")
            if library.nvmlInit_v2() == 0:
                self._library = library

    def nvlink(self, one: str, other: str) -> bool | None:
        """Do the GPUs of these uuids reach each other over NVLink?"""
        if self._library is None:
            return None
        try:
            a, b, status = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int(-1)
            for uuid, handle in ((one, a), (other, b)):
                name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
                if self._library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle)) != 0:
                    return None
            if self._library.nvmlDeviceGetP2PStatus(a, b, ctypes.c_int(self._NVLINK), ctypes.byref(status)) != 0:
                return None
        except AttributeError:
            return None
        return status.value == 0 if status.value in self._KNOWN else None


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
        from ..extension import extension

        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        if torch.cuda.device_count() == 1:  # each rank calls its own GPU 0; topology.py has told them apart by their uuids
            os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        self._host, self._group, self._rank, self._ranks = host, group, rank, ranks
        self._slot_bytes = slot_bytes
        self._words = _allocate(extension().words_bytes(ranks))
        self._data = _allocate(_SLOTS * slot_bytes)
        self._held: list[Any] = []
        self._next: Any = None
        self._next_slot_bytes = 0
        self._names: dict[int, str] = {}
        self.data_name = meeting_name()
        self.core: Any = None

    def meet(self, names: Sequence[str]) -> None:
        """Collective, once all ranks have made theirs: exchange the pointers, and clear this rank's words.

        `names`: every rank's `data_name`."""
        from ..extension import extension

        name = meeting(names)
        words, self._words_handle = self._rendezvous(self._words, name and f"{name}/words")
        data, self._data_handle = self._rendezvous(self._data, name and f"{name}/slots")
        # On a stream of its own: the caller's may stand behind a peer that waits for this rank to bind. No peer writes yet.
        with torch.cuda.stream(torch.cuda.Stream()):
            self._words.zero_()
            device_wait.ended("clearing the words of an arena")
        self.core = extension().CudaArena(
            device=torch.cuda.current_device(), host=self._host, words=words, data=data, slot_bytes=self._slot_bytes
        )

    @property
    def slot_bytes(self) -> int:
        return self._slot_bytes

    def check(self, op: str, site: str) -> None:
        """Raises when a rank of the group has given up, or is gone; `op` and `site` are what waits for it."""
        self._host.check(op, site)
        self.core.check()

    def grow_begin(self, slot_bytes: int) -> None:
        refuse_capture("make the landing area larger")
        self._next, self._next_slot_bytes = _allocate(_SLOTS * slot_bytes), slot_bytes
        self.data_name = meeting_name()
        self._names = {self._rank: self.data_name}
        # What is protected are the slots that go: this rank's calls push into its peers' and read its own. Its plain calls end
        # in the order of their issue, whatever streams they are on, so their last one's event stands for all; the exchange that
        # follows waits for the peers', whose pushes come here. Replays of captured graphs are not seen, and need not be: slots
        # that some graph names are kept (`_held`). Other groups' calls, and other work, touch none of these slots.
        device_wait.until(self.core.ended, f"a call of group '{self._group}', whose landing area is to be made larger,")

    def grow_attach(self, rank: int, name: str) -> None:
        self._names[rank] = name

    def grow_commit(self) -> None:
        """All ranks come to this: the rendezvous is theirs together."""
        pointers, handle = self._rendezvous(self._next, meeting([self._names[rank] for rank in range(self._ranks)]))
        self.core.replace(data=pointers, slot_bytes=self._next_slot_bytes)
        self._held.append((self._data, self._data_handle))
        if self._may_free():
            self._held.clear()
        self._data, self._data_handle = self._next, handle
        self._slot_bytes, self._next = self._next_slot_bytes, None

    def __del__(self) -> None:
        # Before a rendezvous nobody else knows the memory, and nothing was issued.
        if hasattr(self, "_words_handle") and not self._may_free():
            handles = self._words_handle, getattr(self, "_data_handle", None)
            _Process.named.append((self._words, self._data, *handles, self._held, getattr(self, "_next", None)))

    def _may_free(self) -> bool:
        """Does nothing name the memory, and is the device at rest? Takes a second at most. No, where nobody can tell: after an
        error of the device, or where the arena was not finished."""
        try:
            if self.core is not None:
                return not self.core.captured and bool(self.core.free_to_go())
            why = "its peers did not all meet"
        except Exception as error:  # noqa: BLE001 (whatever it is, the device may still use the memory)
            why = f"{type(error).__name__}: {error}"
        if not _Process.told:
            _Process.told = True
            kept = "group '%s': its memory is kept until the process ends, as nobody can tell if its device is at rest: %s"
            log.warning(kept, self._group, why)
        return False

    def unlink(self) -> None:
        """Symmetric memory has no names that could stay behind."""

    def _rendezvous(self, tensor: torch.Tensor, name: str) -> tuple[list[int], Any]:
        """`name`: as `meeting` says."""
        handle = _outside_pools(lambda: _torch_compat.symmetric_rendezvous(tensor, self._group, name))
        _Process.rendezvous += 1
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


class _Process:
    rendezvous = 0
    """How many this process has been through. torch counts them in the keys by which ranks find each other, whatever group they
    are of: ranks with other numbers would wait for each other for ever."""
    named: ClassVar[list[Any]] = []
    """Memory of arenas that are gone, but not the graphs that hold its addresses: a replay must not find it unmapped. Or the
    device was not at rest, or did not say so."""
    told = False
    """That memory is kept as a device did not say so: told once."""


def meeting_name() -> str:
    """What a rank tells the others before they meet: "<rendezvous so far>:<a name that no process has met yet>"."""
    return f"{_Process.rendezvous}:{secrets.token_hex(8)}"


def meeting(names: Sequence[str]) -> str:
    """How the ranks that told each other `names`, by rank, meet: "" where all have been through equally many rendezvous, for
    then torch's own keys fit; else a name, the same for all, which was never used in any of their processes or Stores: a group
    that is closed and bound again, or another one of its name, gets another."""
    alike = len({name.partition(":")[0] for name in names}) == 1
    return "" if alike else f"ub_overlap/rendezvous/{names[0].partition(':')[2]}"


def _outside_pools(body: Callable[[], T]) -> T:
    """`body` on a thread of its own, with a deadline, which a rendezvous of torch's has not.

    While torch warms up for a CUDA graph, what this thread allocates comes from that graph's pool, where nothing may outlive
    the graph; what a rendezvous allocates (tables of pointers) does."""
    device = torch.cuda.current_device()

    def run() -> T:
        with torch.cuda.device(device):
            return body()

    outcome = apart("ub_overlap-rendezvous", run)
    timeout_s = settings.current().init_timeout_s
    try:
        return outcome.result(timeout_s)
    except TimeoutError:
        if outcome.done():
            raise  # the body's own
        raise errors.ArenaError(
            f"torch's rendezvous for symmetric memory did not end within {timeout_s:g} s",
            got="every rank came to it, then silence",
            fix="look at the other ranks' logs; groups that only some ranks shared memory in before may confuse torch",
        ) from None

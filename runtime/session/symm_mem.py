"""The arena of a CUDA group: slots and flag words in torch's symmetric memory, texts and process ids in shared memory.

torch allocates the memory and exchanges its pointers in a rendezvous, a collective without a deadline. So an exchange with a
deadline precedes it: the rendezvous begins once all ranks are there. NVLink multicast is off.

    words    flag words and abort word of every rank (csrc/cuda/state.h); zero before any rank uses them; never replaced
    slots    SLOTS per rank; replaced by larger ones when a call needs more. Slots that captured graphs address are kept
    split    one memory for each split slot, made and replaced when a start needs more
    fused    the same for fused collectives; zero before any rank uses it, since packets are known by their epochs

Freeing torch's memory synchronizes the whole device, without a deadline and with the GIL held. So it is freed only while the
device is idle. Where that cannot be determined, the memory is kept until the process ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from ub_overlap import _torch_compat

from .. import errors, settings
from ..schedule.steps import FUSED_SLOT, SLOTS
from . import device_wait
from .abort_signal import AbortSignal
from .daemon_thread import on_current_device, run_in_daemon_thread

log = logging.getLogger(__name__)

T = TypeVar("T")


def describe_gpu() -> dict[str, Any]:
    """Describe the current device by a uuid that is the same in all processes of the host, its name and its capability."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "uuid": str(properties.uuid),
        "name": properties.name,
        "capability": [properties.major, properties.minor],
    }


def device_label() -> str:
    """Return the current device in words, for the log."""
    index = torch.cuda.current_device()
    return f"cuda:{index} ({torch.cuda.get_device_name(index)})"


def find_links(uuids: Sequence[str], rank: int) -> dict[str, list[bool | None]]:
    """Return by rank whether this rank has "peer" access to that rank's device, and whether that goes over "nvlink".

    None: unknown (a device that this process does not see, no NVML). The rendezvous then shows it.
    """
    current = torch.cuda.current_device()
    visible = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    link_counts, nvml = _torch_compat.nvlinks(), _Nvml()
    peer: list[bool | None] = []
    nvlink: list[bool | None] = []
    for other, uuid in enumerate(uuids):
        if other == rank or uuid == uuids[rank]:
            peer.append(True)
            nvlink.append(True)
            continue
        index = visible.get(uuid)
        peer.append(None if index is None else torch.cuda.can_device_access_peer(current, index))
        has_links = link_counts is not None and index is not None and link_counts[current][index] > 0
        # torch counts links by their remote ends and misses links through switches that a virtual machine hides. So a
        # count of zero proves nothing; NVML's answer for the pair does.
        nvlink.append(True if has_links else nvml.has_nvlink(uuids[rank], uuid))
    return {"peer": peer, "nvlink": nvlink}


class _Nvml:
    """NVIDIA's management library, where it is installed. An answer that it refuses is None."""

    _NVLINK = 2  # of nvmlGpuP2PCapsIndex_t
    _KNOWN = range(6)  # of nvmlGpuP2PStatus_t: 0 is OK, 1 to 5 are reasons against, larger values are unknown

    def __init__(self) -> None:
        self._library: Any = None
        with contextlib.suppress(OSError, AttributeError):
            library = ctypes.CDLL("libnvidia-ml.so.1")
            if library.nvmlInit_v2() == 0:
                self._library = library

    def has_nvlink(self, first: str, second: str) -> bool | None:
        """Return whether the GPUs of these uuids are linked by NVLink."""
        if self._library is None:
            return None
        try:
            a, b, status = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int(-1)
            for uuid, handle in ((first, a), (second, b)):
                name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
                if self._library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle)) != 0:
                    return None
            if self._library.nvmlDeviceGetP2PStatus(a, b, ctypes.c_int(self._NVLINK), ctypes.byref(status)) != 0:
                return None
        except AttributeError:
            return None
        return status.value == 0 if status.value in self._KNOWN else None


def refuse_capture(doing: str) -> None:
    """Raise ArenaError during a CUDA graph capture, when memory cannot be shared."""
    if torch.cuda.is_current_stream_capturing():
        raise errors.ArenaError(
            f"cannot {doing} while a CUDA graph is captured",
            fix="run the same calls once before the capture, on all ranks",
        )


class SymmetricArena:
    """The arena that `Session` uses on CUDA. It grows by the same steps as a `ShmArena`. `core`: its C++ object."""

    def __init__(self, host: Any, group: str, rank: int, ranks: int, slot_bytes: int, abort: AbortSignal | None = None) -> None:
        from ..extension import extension

        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        # Where each rank sees its own GPU as index 0, topology.py distinguished them by uuid.
        if torch.cuda.device_count() == 1 or settings.current().shared_gpus:
            os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        self._host, self._group, self._rank, self._ranks = host, group, rank, ranks
        self._slot_bytes = slot_bytes
        self._abort = abort or AbortSignal(group)
        self._words = _allocate(extension().words_bytes(ranks))
        self._data = _allocate(SLOTS * slot_bytes)
        self._retained: list[Any] = []
        self._next: Any = None
        self._next_slot_bytes = self._next_slot = 0
        self._split: dict[int, tuple[Any, Any, int]] = {}
        """Split slots that were used: memory, torch's handle and bytes, by slot."""
        self._channels: tuple[Any, Any] | None = None
        self._tokens: dict[int, str] = {}
        self.data_address = new_rendezvous_token()
        self.core: Any = None

    def rendezvous(self, tokens: Sequence[str]) -> None:
        """Exchange pointers with all ranks and clear this rank's words. Collective, once all ranks have allocated.

        `tokens`: every rank's `data_address`.
        """
        from ..extension import extension

        name = rendezvous_name(tokens)
        words, self._words_handle = self._rendezvous(self._words, name and f"{name}/words")
        data, self._data_handle = self._rendezvous(self._data, name and f"{name}/slots")
        _clear(self._words, "clearing the words of an arena")
        self.core = extension().CudaArena(
            device=torch.cuda.current_device(), host=self._host, words=words, data=data, slot_bytes=self._slot_bytes
        )

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot."""
        return self._slot_bytes

    def bytes_of_slot(self, slot: int) -> int:
        """Return the bytes of a slot, 0 for a split slot that no call has used."""
        if slot < SLOTS:
            return self._slot_bytes
        return self._split[slot][2] if slot in self._split else 0

    def check(self, op: str, site: str) -> None:
        """Raise when a rank of the group has failed or is gone. `op` and `site`: the call that waits for it."""
        self._host.check(op, site)
        self.core.check()

    def check_site(self, slot: int) -> None:
        """Raise when a rank's call in this slot is at another site than this rank's."""
        self.core.check_site(slot)

    def is_capturing(self) -> bool:
        """The current stream is being captured, so that the arena cannot grow."""
        return torch.cuda.is_current_stream_capturing()

    def grow_begin(self, slot_bytes: int, slot: int = 0) -> None:
        """Allocate larger slots, or a larger split slot, then wait until no call of this rank uses the old memory."""
        refuse_capture("grow the landing area")
        self._next = _allocate((SLOTS if slot < SLOTS else 1) * slot_bytes)
        if slot == FUSED_SLOT:
            _clear(self._next, "clearing the memory of fused collectives")
        self._next_slot_bytes, self._next_slot = slot_bytes, slot
        self.data_address = new_rendezvous_token()
        self._tokens = {self._rank: self.data_address}
        # The wait protects the old slots: this rank's calls push into its peers' and read its own. Its eager calls end in issue
        # order on any stream, so the last call's event covers all of them. The exchange that follows waits for the peers'
        # calls, which push into this rank's slots. Replays of captured graphs are not covered, and need not be: slots that a
        # graph addresses are kept (`_retained`). Calls of other groups and other work touch none of these slots. The pushes of
        # open split collectives may run on: they use other split slots, as a start finds its own closed.
        description = f"a call of group '{self._group}', whose landing area is to grow,"
        device_wait.wait_until(self.core.has_ended, description, self._abort.check)

    def grow_attach(self, rank: int, name: str) -> None:
        """Take a peer's rendezvous token."""
        self._tokens[rank] = name

    def grow_commit(self) -> None:
        """Exchange pointers and switch to the larger slots. Collective."""
        name = rendezvous_name([self._tokens[rank] for rank in range(self._ranks)])
        pointers, handle = self._rendezvous(self._next, name)
        slot = self._next_slot
        self.core.replace(data=pointers, slot_bytes=self._next_slot_bytes, slot=slot)
        replaced = (self._data, self._data_handle) if slot < SLOTS else self._split.get(slot)
        if replaced is not None:
            self._retained.append(replaced)
        if self._can_free():
            self._retained.clear()
        if slot < SLOTS:
            self._data, self._data_handle = self._next, handle
            self._slot_bytes = self._next_slot_bytes
        else:
            self._split[slot] = self._next, handle, self._next_slot_bytes
        self._next = None

    def __del__(self) -> None:
        # Before a rendezvous no peer has the addresses, and nothing was issued.
        if hasattr(self, "_words_handle") and not self._can_free():
            handles = self._words_handle, getattr(self, "_data_handle", None)
            kept = self._words, self._data, *handles, self._retained, self._split, self._channels, getattr(self, "_next", None)
            _process.retained.append(kept)

    def _can_free(self) -> bool:
        """Return whether no graph addresses the memory and the device is idle. Takes at most a second.

        False where that is unknown: after a device error, or where the rendezvous did not complete.
        """
        try:
            if self.core is not None:
                return not self.core.is_captured and bool(self.core.can_free())
            why = "the rendezvous of its ranks did not complete"
        except Exception as error:  # noqa: BLE001 (after any error the device may still use the memory)
            why = f"{type(error).__name__}: {error}"
        if not _process.has_warned:
            _process.has_warned = True
            text = "group '%s': its memory is kept until the process ends, because its device may still be using it: %s"
            log.warning(text, self._group, why)
        return False

    def grow_abort(self) -> None:
        """Free the larger slots of a growth that failed."""
        if self._can_free():
            self._next = None

    def stop_sharing(self) -> None:
        """Do nothing: only torch's rendezvous shares this memory."""

    def share_channels(self, segment: Any, exchange_tokens: Callable[[str], Sequence[str]]) -> list[int]:
        """Allocate the memory of the group's channels, and return every rank's pointer to its own. Collective, once.

        `segment`: the host memory of the channels, which knows their sizes.
        """
        from ..extension import extension

        refuse_capture("set up the channels")
        memory = _allocate(extension().channel_bytes(segment))
        name = rendezvous_name(exchange_tokens(new_rendezvous_token()))
        pointers, handle = self._rendezvous(memory, name and f"{name}/channels")
        self._channels = (memory, handle)
        _clear(memory[: extension().channel_words_bytes(segment)], "clearing the words of channels")
        return pointers

    def _rendezvous(self, tensor: torch.Tensor, name: str) -> tuple[list[int], Any]:
        """Return every rank's pointer to its `tensor`, and torch's handle. `name`: of `rendezvous_name`."""
        handle = _outside_pools(lambda: _torch_compat.symmetric_rendezvous(tensor, self._group, name), self._abort)
        _process.rendezvous_count += 1
        pointers = [int(pointer) for pointer in handle.buffer_ptrs]
        offset = tensor.data_ptr() - pointers[self._rank]  # of the tensor within its allocation, the same on all ranks
        if len(pointers) != self._ranks or not 0 <= offset < 1 << 30:
            raise errors.ArenaError(
                "torch's symmetric memory has an unknown layout",
                got=f"{len(pointers)} pointers, offset {offset}",
                expected=f"{self._ranks} pointers, and the tensor within its buffer",
            )
        return [pointer + offset for pointer in pointers], handle


def _allocate(size: int) -> torch.Tensor:
    return _torch_compat.symmetric_empty(size, torch.device("cuda", torch.cuda.current_device()))


def _clear(memory: torch.Tensor, description: str) -> None:
    """Fill memory that no peer writes yet with zeros, and wait. `description`: for the error of the deadline."""
    # On a separate stream: the caller's may wait for a peer that waits for this rank.
    with torch.cuda.stream(torch.cuda.Stream()):
        memory.zero_()
        device_wait.wait_for_event(description)


@dataclass
class _ProcessState:
    rendezvous_count: int = 0
    """Rendezvous that this process completed. torch counts them over all groups in the keys by which ranks find each other:
    ranks with other counts would wait for each other forever."""
    retained: list[Any] = field(default_factory=list)
    """Memory of deleted arenas that captured graphs still address, as a replay must not find it unmapped; or whose device was
    busy, or did not say."""
    has_warned: bool = False
    """The warning that memory is kept for an unknown device state was logged; it is logged once."""


_process = _ProcessState()


def new_rendezvous_token() -> str:
    """Return the text that a rank sends its peers before a rendezvous: "<rendezvous completed>:<random name>"."""
    return f"{_process.rendezvous_count}:{secrets.token_hex(8)}"


def rendezvous_name(tokens: Sequence[str]) -> str:
    """Return the rendezvous name that all ranks derive from their exchanged `tokens`, by rank.

    "" where all have completed equally many rendezvous: torch's own keys then match. Otherwise a name that no process or Store
    has used. So a group that is closed and bound again, or another group of the same name, gets a new one.
    """
    has_equal_counts = len({token.partition(":")[0] for token in tokens}) == 1
    return "" if has_equal_counts else f"ub_overlap/rendezvous/{tokens[0].partition(':')[2]}"


def _outside_pools(body: Callable[[], T], abort: AbortSignal) -> T:
    """Run `body` on another thread, with a deadline, which torch's rendezvous lacks.

    While torch warms up for a CUDA graph, this thread allocates from that graph's pool, where nothing may outlive the graph.
    The pointer tables of a rendezvous do outlive it.
    """
    outcome = run_in_daemon_thread("ub_overlap-rendezvous", on_current_device(body))
    timeout_s = settings.current().init_timeout_s
    try:
        return abort.result(outcome, timeout_s, "torch's rendezvous for symmetric memory")
    except TimeoutError:
        if outcome.done():
            raise  # by the body
        raise errors.ArenaError(
            f"torch's rendezvous for symmetric memory did not end within {timeout_s:g} s",
            got="every rank started it, then no progress",
            fix="look at the other ranks' logs; torch may fail after groups in which only some ranks shared memory",
        ) from None

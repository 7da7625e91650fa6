"""Channels of a group: agree on their sizes, share their memory. Collective over the group, at its first message.

channels/N/sizes      bytes of a slot and number of slots that ranks request -> the largest
channels/N/addresses  addresses of the shared memory -> attach to all peers'
channels/N/memory     CUDA: rendezvous tokens        -> torch's rendezvous
channels/N/ready      nothing                        -> all words are zero
"""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ub_overlap import _torch_compat

from .. import errors, ops  # noqa: F401  (ops installs the runtime in the extension)
from ..extension import extension
from ..functional.groups import device_of
from ..session import bind
from ..session.group_argument import Group, name_of
from ..session.session import Session
from ..site_id import SiteId

log = logging.getLogger(__name__)

SLOTS = 4
"""Messages that a channel holds by default: as many may be in flight before the source waits for its destination."""
FAR_BYTES = 1 << 20
"""Bytes of such a message between ranks that are not neighbours, at most."""
_LEAST_BYTES = {"cpu": 1 << 20, "cuda": 8 << 20}
_MOST_BYTES = 64 << 20
"""Bytes of a message of which a channel holds SLOTS, unless a caller requests them."""
_SITE = "connect"


@dataclass(eq=False, slots=True)
class _Setup:
    """How far the channels of a group are set up. `plain`: types of devices on which the group has no transport."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    plain: set[str] = field(default_factory=set)


_setups: weakref.WeakKeyDictionary[Any, _Setup] = weakref.WeakKeyDictionary()
"""By process group."""


def initialize_point_to_point(
    group: Group,
    bytes_or_shape: int | Sequence[int],
    dtype: torch.dtype | None = None,
    *,
    slots: int = SLOTS,
    device: torch.device | str | None = None,
) -> int:
    """Set up the channels of `group` before its first message, with memory of a given size. Collective over the group.

    `bytes_or_shape`: bytes of the largest message, or its shape with its `dtype`. `slots`: messages between two neighbours, in
    one direction, that may be sent before the first of them is received. Rank r has such slots for the messages of r - 1 and of
    r + 1, and slots of at most 1 MiB for those of other ranks. Where ranks request different sizes, the largest count.
    Messages of more than 16 MiB have several slots each.

    Return the bytes of a message of which a channel holds `slots`; 0 where the group has no transport, and c10d sends. Larger
    messages are sent in more pieces. Once the channels exist, their sizes are fixed: OptionError for a request of larger ones.
    """
    where = torch.device(device) if device is not None else device_of(name_of(group))
    if isinstance(bytes_or_shape, int):
        needed = bytes_or_shape
    elif dtype is not None:
        needed = math.prod(bytes_or_shape) * dtype.itemsize
    else:
        needed = 0
    if needed < 1 or not 1 <= slots <= 64:
        raise errors.OptionError(
            "invalid size of channels",
            where="ub_overlap.initialize_point_to_point",
            got=f"{bytes_or_shape!r}, dtype {dtype!r}, {slots} slots",
            expected="bytes of 1 or more, or a shape and a dtype; 1 to 64 slots",
        )
    name = name_of(group)
    channels = _find_or_connect(name, where.type, needed, slots)
    if channels is None:
        return 0
    session = bind.find_session(name, where.type)
    assert session is not None, "the channels are those of a session"
    held = session.message_bytes
    if held < needed:
        raise errors.OptionError(
            "the channels of the group exist, and cannot grow",
            where=f"ub_overlap.initialize_point_to_point, group '{name}'",
            got=f"{needed} bytes",
            expected=f"at most {held} bytes",
            fix="call it before the first message of the group",
        )
    return held


def connect(group: str, device: str, size: int) -> Any:
    """Return the channels of `group`, made for messages of `size` bytes; None where the group has no transport.

    All ranks of the group take part, at their first message. PeerTimeoutError names those that do not.
    """
    return _find_or_connect(group, device, min(max(size, _LEAST_BYTES.get(device, 1)), _MOST_BYTES), SLOTS)


def _find_or_connect(group: str, device: str, size: int, slots: int) -> Any:
    """Return the channels of a group. Several threads may send its first messages, and one of them makes the channels."""
    setup = _setups.setdefault(_torch_compat.group_of(group), _Setup())
    with setup.lock:
        channels = extension().find_channels(group, device)
        if channels is None and device not in setup.plain:
            channels = _connect(group, device, size, slots)
            if channels is None:
                setup.plain.add(device)  # a collective found that out, which later messages must not run
        return channels


def _connect(group: str, device: str, size: int, slots: int) -> Any:
    session = _bound_session(group, device)
    if session.core.transport in ("c10d", "local"):
        return None
    channels = session.share_channels(size, slots, FAR_BYTES)
    log.info(
        "group '%s': channels with %d slots of %d bytes between neighbours, %d bytes per rank",
        group, channels.slots, channels.slot_bytes, channels.total_bytes,
    )  # fmt: skip
    return channels.core


def _bound_session(group: str, device: str) -> Session:
    """Return the session of `group`, which a first call makes."""
    if device not in _LEAST_BYTES:
        raise errors.OptionError("no transport for tensors of this device", got=device, expected="cpu or cuda")
    where = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
    scalar = torch.zeros(1, device=where)
    site = str(SiteId("", _SITE))
    torch.ops.ub_overlap.bulk(scalar, [], [], "all_gather", "sum", scalar.dtype, "bulk", group, site)
    session = bind.find_session(group, device)
    assert session is not None, "the op above has bound the group"
    return session


extension().set_connect(connect)

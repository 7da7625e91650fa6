"""abort: end the waits of a group from any thread."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist

from ub_overlap import _torch_compat

from ..errors import OptionError, UbOverlapError
from . import abort_signal, inherited_groups, own_groups
from .daemon_thread import run_in_daemon_thread
from .group_argument import Group, name_of
from .made_groups import MEETING
from .store_exchange import Exchange

log = logging.getLogger("ub_overlap.runtime")

_TELL_S = 1.0
"""Seconds that `abort` waits for Stores to take the news of groups without a session."""


def abort(group: Group = None, *, reason: str = "") -> None:
    """Abort `group`: end its waits on this rank, now, and make it unusable. Like ncclCommAbort.

    Call it from any thread, also while another thread is inside an op, before the first op, or after the group was destroyed.
    Further calls do nothing. `group` None: every group of this process, as for torch.distributed.

    A wait that it ends raises GroupAbortedError, and so does each later op of the group: waits inside an op, on the CPU or on
    the GPU, and waits for the other ranks at a first call. The outputs of a GPU call that did not end are NaN. The other
    ranks' waits end as well; they raise PeerFailedError, which names this rank. `reason` is part of both errors. Groups of ours
    that were made from `group` end with it: those of `fsdp.install`, `ddp.install` and hierarchical collectives.

    A forked child cannot abort its parent's groups: a ForkError where `group` is one, else they are left alone.

    To go on, destroy the process group and make it again. Plain collectives in
    flight are c10d's to abort; on the CPU our ops no longer wait for them.
    """
    frame = sys._getframe(1)
    by = f"ub_overlap.abort() in thread '{threading.current_thread().name}' at {frame.f_code.co_filename}:{frame.f_lineno}"
    text = f"{by}: {reason}" if reason else by
    groups, is_of_group = _find(group)
    fresh = [members for members in groups if abort_signal.mark(members, text)]  # first: no new session begins from here on
    signals = [signal for signal in abort_signal.signals() if is_of_group(signal)]
    for signal in signals:
        if signal.set(text):
            log.warning("group '%s' was aborted by %s", signal.group, text)
    told = []
    for members in (one for one in fresh if one in _torch_compat.process_groups()):
        bound = {signal.device for signal in signals if signal.members() is members}
        for device in (*_torch_compat.device_types(members), MEETING):
            if device not in bound:
                with contextlib.suppress(UbOverlapError):  # no room for a thread: this rank's waits have ended all the same
                    told.append(run_in_daemon_thread("ub_overlap-store", partial(_tell, members, device, text)))
    end = time.monotonic() + _TELL_S
    for outcome in told:
        with contextlib.suppress(Exception):
            outcome.result(max(0.0, end - time.monotonic()))


def _find(group: Group) -> tuple[list[Any], Callable[[abort_signal.AbortSignal], bool]]:
    """Return the living process groups that `group` means, and whether a session's signal is of one of them."""
    if group is None:
        living = _torch_compat.process_groups() if dist.is_initialized() else []
        return [members for members in living if not inherited_groups.is_inherited(members)], lambda signal: True
    try:
        members = _torch_compat.group_of(name_of(group))
    except (OptionError, RuntimeError, ValueError, KeyError):
        # A destroyed group may have waits that have not ended. Its object, or its name, still tells which.
        def is_destroyed(signal: abort_signal.AbortSignal) -> bool:
            return signal.group == group or signal.members() is group

        known = isinstance(group, dist.ProcessGroup) or any(map(is_destroyed, abort_signal.signals()))
        if dist.is_initialized() and not known:
            raise
        return [], is_destroyed
    if inherited_groups.is_inherited(members):
        raise inherited_groups.fork_error(members.group_name)
    groups = [members, *own_groups.groups_made_from(members)]
    return groups, lambda signal: any(signal.members() is one for one in groups)


def _tell(members: Any, device: str, text: str) -> None:
    """Join the first call of a group without a session, and fail: its other ranks may wait there."""
    if members.size() > 1 and not _torch_compat.is_fake_group(members.group_name):
        store = _torch_compat.store_of(members)
        exchange = Exchange(store, members.group_name, device, members.rank(), members.size(), "abort", "")
        exchange.fail(text)

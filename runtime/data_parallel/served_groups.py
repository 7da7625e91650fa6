"""Which process groups have a transport. Collectives of the others stay torch's own, and the log says why, once.

Each served group gets a group of ours with the same ranks. So split slots that hold results between calls are never those of
a compiled graph's collectives on the user's group. Its backend is gloo, which only lets the ranks meet. Its memory is freed
once the user's group is destroyed.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ub_overlap import _torch_compat as compat
from ub_overlap._c10d_compat import new_group_like

from .. import settings
from ..functional.arena import initialize_group
from ..session import watchdog
from ..session.bind import find_session
from ..session.transport import unsupported_reason

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _OwnGroup:
    """A group of ours. `served`: weakly, the user's group. `device`: type of the tensors."""

    served: weakref.ref[ProcessGroup]
    device: str
    made: Any
    is_registered: bool = True

    def is_orphaned(self) -> bool:
        served = self.served()
        return served is None or served not in compat.process_groups()


_own_groups: list[_OwnGroup] = []


def release_orphans() -> None:
    """Make our groups whose user's group was destroyed unknown to ops. The watchdog then frees their memory."""
    for own in list(_own_groups):
        if own.is_registered and own.is_orphaned():
            own.is_registered = False
            if own.made in compat.process_groups():  # not destroyed: no other group can have its name
                compat.unregister_group(own.made.group_name)


def _destroy_orphans() -> None:
    """Destroy them. Not on the watchdog's thread: another one may be making a group."""
    for own in [own for own in _own_groups if own.is_orphaned()]:
        _own_groups.remove(own)
        with contextlib.suppress(ValueError, RuntimeError):  # it was destroyed together with all groups
            dist.destroy_process_group(own.made)


class ServedGroups:
    """The groups that `user`, e.g. "fully_shard", has asked for, and why some of them are not served."""

    def __init__(self, user: str) -> None:
        self._user = user
        # By the user's group: name of ours and "", or "" and the reason.
        self._found: weakref.WeakKeyDictionary[ProcessGroup, tuple[str, str]] = weakref.WeakKeyDictionary()
        self._logged: set[str] = set()

    def serve(self, group: ProcessGroup, device: torch.device) -> str:
        """Return the name of the group to call instead of `group`, "" without a transport. Collective at its first call."""
        if group not in self._found:
            self._found[group] = _find_own_group(group, device)
        own_group, reason = self._found[group]
        if reason:
            self.say_once(f"group '{group.group_name}' keeps torch's collectives: {reason}")
        return own_group

    def own_groups(self) -> list[str]:
        """Return the names of the groups to call, but for users' groups that were destroyed."""
        return [own.made.group_name for own in _own_groups if own.served() in self._found and not own.is_orphaned()]

    def say_once(self, text: str) -> None:
        """Log `text` unless it was logged before."""
        if text not in self._logged:
            self._logged.add(text)
            log.warning("%s: %s", self._user, text)


def _find_own_group(group: ProcessGroup, device: torch.device) -> tuple[str, str]:
    """Bind `group`, and make and bind ours. Return the name of ours and "", or "" and why `group` has no transport."""
    name = group.group_name
    _destroy_orphans()
    for own in _own_groups:
        if own.served() is group and own.device == device.type:
            return own.made.group_name, ""
    reason = unsupported_reason(device.type, name, group.size())
    if reason is not None:
        return "", reason
    initialize_group(name, 1, device=device)
    session = find_session(name, device.type)
    assert session is not None, "initialize_group has bound it"
    if not session.slot_bytes:
        return "", str(session.core.reason)
    limit = timedelta(seconds=settings.current().init_timeout_s)
    made = new_group_like(group, "gloo", limit, f"data parallelism of {name}")
    initialize_group(made.group_name, 1, device=device)
    _own_groups.append(_OwnGroup(weakref.ref(group), device.type, made))
    watchdog.call_at_poll(release_orphans)
    return made.group_name, ""

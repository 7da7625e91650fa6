"""Which process groups have a transport. Collectives of the others stay torch's own, and the log says why, once.

Each served group gets a group of ours with the same ranks. So split slots that hold results between calls are never those of
a compiled graph's collectives on the user's group. Its backend is gloo, which only lets the ranks meet. Its memory is freed
once the user's group is destroyed.
"""

from __future__ import annotations

import logging
import weakref
from datetime import timedelta

import torch
from torch.distributed import ProcessGroup

from ub_overlap import _torch_compat as compat

from .. import settings
from ..functional.arena import initialize_group
from ..session import own_groups
from ..session.bind import find_session
from ..session.made_groups import make_group_like
from ..session.transport import unsupported_reason

log = logging.getLogger(__name__)


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
        living = compat.process_groups()
        return [name for group, (name, _) in self._found.items() if name and group in living]

    def say_once(self, text: str) -> None:
        """Log `text` unless it was logged before."""
        if text not in self._logged:
            self._logged.add(text)
            log.warning("%s: %s", self._user, text)


def _find_own_group(group: ProcessGroup, device: torch.device) -> tuple[str, str]:
    """Bind `group`, and make and bind ours. Return the name of ours and "", or "" and why `group` has no transport."""
    name = group.group_name
    own_groups.destroy_orphans()
    if (known := own_groups.find_group(group, _purpose(device))) is not None:
        return known.group_name, ""
    reason = unsupported_reason(device.type, name, group.size())
    if reason is not None:
        return "", reason
    initialize_group(name, 1, device=device)
    session = find_session(name, device.type)
    assert session is not None, "initialize_group has bound it"
    if not session.slot_bytes:
        return "", str(session.core.reason)
    limit = timedelta(seconds=settings.current().init_timeout_s)
    made = make_group_like(group, "gloo", limit, f"data parallelism of {name}", "data parallelism")
    initialize_group(made.group_name, 1, device=device)
    own_groups.add_group(group, _purpose(device), made, made.group_name)
    return made.group_name, ""


def _purpose(device: torch.device) -> str:
    return f"data parallelism on {device.type}"

"""Which process groups have a transport. Collectives of the others stay torch's own, and the log says why, once.

Each served group gets a group of ours with the same ranks. So split slots that hold results between calls are never those of
a compiled graph's collectives on the user's group. Its backend is gloo, which only lets the ranks meet.
"""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ..functional.arena import initialize_group
from ..session.bind import find_session
from ..session.transport import unsupported_reason

log = logging.getLogger(__name__)

_own_groups: dict[tuple[str, str], tuple[ProcessGroup, str]] = {}
"""By group name and device type: the user's group, and the name of ours. Another group may get the first name later."""


class ServedGroups:
    """The groups that `user`, e.g. "fully_shard", has asked for, and why some of them are not served."""

    def __init__(self, user: str) -> None:
        self._user = user
        self._found: dict[str, tuple[str, str]] = {}  # by the user's group: name of ours and "", or "" and the reason
        self._logged: set[str] = set()

    def serve(self, group: ProcessGroup, device: torch.device) -> str:
        """Return the name of the group to call instead of `group`, "" without a transport. Collective at its first call."""
        name = group.group_name
        if name not in self._found:
            self._found[name] = _find_own_group(group, device)
        own_group, reason = self._found[name]
        if reason:
            self.say_once(f"group '{name}' keeps torch's collectives: {reason}")
        return own_group

    def own_groups(self) -> list[str]:
        """Return the names of the groups to call."""
        return [own_group for own_group, _ in self._found.values() if own_group]

    def say_once(self, text: str) -> None:
        """Log `text` unless it was logged before."""
        if text not in self._logged:
            self._logged.add(text)
            log.warning("%s: %s", self._user, text)


def _find_own_group(group: ProcessGroup, device: torch.device) -> tuple[str, str]:
    """Bind `group`, and make and bind ours. Return the name of ours and "", or "" and why `group` has no transport."""
    name = group.group_name
    known, own_group = _own_groups.get((name, device.type), (None, ""))
    if known is group:
        return own_group, ""
    reason = unsupported_reason(device.type, name, group.size())
    if reason is not None:
        return "", reason
    initialize_group(name, 1, device=device)
    session = find_session(name, device.type)
    assert session is not None, "initialize_group has bound it"
    if not session.slot_bytes:
        return "", str(session.core.reason)
    ranks = dist.get_process_group_ranks(group)
    made = dist.new_group(ranks, backend="gloo", use_local_synchronization=True, group_desc=f"ub_overlap for {name}")
    assert isinstance(made, ProcessGroup), "this rank is among the ranks"
    initialize_group(made.group_name, 1, device=device)
    _own_groups[name, device.type] = group, made.group_name
    return made.group_name, ""

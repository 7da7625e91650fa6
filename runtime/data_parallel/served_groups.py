"""Which process groups have a transport. Collectives of the others stay torch's own, and the log says why, once."""

from __future__ import annotations

import logging

import torch
from torch.distributed import ProcessGroup

from ..functional.arena import initialize_group
from ..session.bind import find_session
from ..session.transport import unsupported_reason

log = logging.getLogger(__name__)


class ServedGroups:
    """The groups that `user`, e.g. "fully_shard", has asked for, and why some of them are not served."""

    def __init__(self, user: str) -> None:
        self._user = user
        self._reasons: dict[str, str] = {}  # by group name; "" where it is served
        self.served: dict[str, torch.device] = {}
        """The device of each group that is served, by name."""
        self._logged: set[str] = set()

    def serve(self, group: ProcessGroup, device: torch.device) -> bool:
        """Return whether the transport serves `group`. Collective over the group at its first call, which binds it."""
        name = group.group_name
        if name not in self._reasons:
            self._reasons[name] = _bind(name, group.size(), device)
            if not self._reasons[name]:
                self.served[name] = device
        reason = self._reasons[name]
        if reason:
            self.say_once(f"group '{name}' keeps torch's collectives: {reason}")
        return not reason

    def say_once(self, text: str) -> None:
        """Log `text` unless it was logged before."""
        if text not in self._logged:
            self._logged.add(text)
            log.warning("%s: %s", self._user, text)


def _bind(name: str, ranks: int, device: torch.device) -> str:
    """Bind the group. Return why it has no transport, "" if it has one."""
    reason = unsupported_reason(device.type, name, ranks)
    if reason is not None:
        return reason
    initialize_group(name, 1, device=device)
    session = find_session(name, device.type)
    assert session is not None, "initialize_group has bound it"
    return "" if session.slot_bytes else str(session.core.reason)

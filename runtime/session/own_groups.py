"""Process groups of ours that are made from a user's group. They end with it.

torch has no hook for destroy_process_group(). So the watchdog makes such a group unknown to ops, which frees its memory. The
next one that is made destroys it: the watchdog's thread must not, since another thread may be making a group.
"""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ub_overlap import _torch_compat as compat

from . import abort_signal, watchdog


@dataclass(eq=False)
class _OwnGroup:
    """`origin`: weakly, the user's group. `purpose`: what tells the groups made from it apart. `name`: by which ops find it."""

    origin: weakref.ref[Any]
    purpose: str
    made: Any
    name: str
    is_registered: bool = True

    def is_orphaned(self) -> bool:
        origin = self.origin()
        return origin is None or origin not in compat.process_groups()


_own_groups: list[_OwnGroup] = []


def add_group(origin: Any, purpose: str, made: Any, name: str) -> None:
    """End `made` with `origin`, at once where that was aborted."""
    abort_signal.mark_like(made, origin)
    _own_groups.append(_OwnGroup(weakref.ref(origin), purpose, made, name))
    watchdog.call_at_poll(release_orphans)


def find_group(origin: Any, purpose: str) -> Any | None:
    """Return the group of ours that was made from `origin` for `purpose`; None without one."""
    living = (own for own in _own_groups if own.origin() is origin and not own.is_orphaned())
    return next((own.made for own in living if own.purpose == purpose), None)


def groups_made_from(origin: Any) -> list[Any]:
    """Return our groups that were made from `origin`."""
    return [own.made for own in _own_groups if own.origin() is origin and own.is_registered]


def release_orphans() -> None:
    """Make our groups whose user's group was destroyed unknown to ops. The watchdog then frees their memory."""
    for own in list(_own_groups):
        if own.is_registered and own.is_orphaned():
            own.is_registered = False
            with contextlib.suppress(RuntimeError, ValueError, KeyError):  # all groups were destroyed together
                if compat.group_of(own.name) is own.made:
                    compat.unregister_group(own.name)


def destroy_orphans() -> None:
    """Destroy them. Call it before a group is made."""
    for own in [own for own in _own_groups if own.is_orphaned()]:
        _own_groups.remove(own)
        with contextlib.suppress(ValueError, RuntimeError):  # it was destroyed together with all groups
            if own.made in compat.process_groups():
                dist.destroy_process_group(own.made)
            else:  # c10d knows only the name
                own.made.shutdown()

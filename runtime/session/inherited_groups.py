"""Process groups that a forked child inherited from its parent.

Their sockets are the parent's: a child that used one would act as its parent, and peers would take its tensors for the
parent's. So every group that exists at a fork is marked in the child, bound or not. Ops on it raise ForkError (csrc/core/
registry.h), and the child does not touch its Store. Groups that the child creates are not affected.

`import ub_overlap` imports this module, so it imports neither torch nor the extension.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

_FORKED_WITHOUT_EXEC = 0x40
"""PF_FORKNOEXEC of the kernel's process flags."""

_inherited: list[Any] = []
"""The groups, alive: the destructors of torch's backends join threads that only the parent has, which ends the child."""


def is_inherited(group: Any) -> bool:
    """Return whether a c10d group belongs to the process from which this one was forked."""
    return any(group is other for other in _inherited)


def fork_error(group: str) -> Exception:
    """Return the ForkError for an inherited group."""
    from ub_overlap.runtime import errors

    return errors.ForkError(
        f"this process was forked from the one that created group '{group}'",
        got=f"pid {os.getpid()}, with the connections of its parent",
        expected="a group that this process created",
        fix="call it in the process that created the group",
    )


def install(extension: Any) -> None:
    """Make the ops of `extension` refuse the inherited groups."""
    from ub_overlap import _torch_compat

    names = []
    for group in _inherited:
        with contextlib.suppress(Exception):  # destroyed since: its name is unknown, or another group's
            if _torch_compat.group_of(group.group_name) is group:
                names.append(group.group_name)
    if names:
        extension.set_inherited_groups(names)


def mark_groups() -> None:
    """Mark all groups of this process as inherited. Runs in every forked child."""
    if "torch.distributed.distributed_c10d" not in sys.modules:
        return
    from ub_overlap import _torch_compat

    _inherited.extend(group for group in _torch_compat.process_groups() if not is_inherited(group))
    if extension := sys.modules.get("ub_overlap._C"):
        install(extension)


def _has_only_inherited_groups() -> bool:
    """Return whether this process was forked with the groups that it has now.

    Backends of c10d start threads, which a fork does not copy: a process with one thread has created no group.
    """
    try:
        with open("/proc/self/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return bool(int(fields[6]) & _FORKED_WITHOUT_EXEC) and len(os.listdir("/proc/self/task")) == 1
    except (OSError, ValueError, IndexError):
        return False


os.register_at_fork(after_in_child=mark_groups)
if _has_only_inherited_groups():  # the backend is loaded by its name: the parent may not have imported this package
    mark_groups()

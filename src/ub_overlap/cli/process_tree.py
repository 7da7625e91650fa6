"""The descendants of a process, from /proc, also those that have a session of their own, as ranks of torchrun do."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

PARENT, STARTED = 1, 19
"""Fields of /proc/PID/stat behind the name of the program."""


def find_descendants(pids: Iterable[int]) -> dict[int, str]:
    """Return the processes that `pids` started, directly or not, with their start times."""
    children: dict[int, dict[int, str]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        if fields := _fields(int(folder.name)):
            children.setdefault(int(fields[PARENT]), {})[int(folder.name)] = fields[STARTED]
    found: dict[int, str] = {}
    left = list(pids)
    while left:
        new = children.get(left.pop(), {})
        found |= new
        left += new
    return found


def kill(processes: Mapping[int, str]) -> None:
    """Send SIGKILL to those that still run. A process with another start time has taken the number of one that ended."""
    for pid, started in processes.items():
        if (fields := _fields(pid)) and fields[STARTED] == started:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def _fields(pid: int) -> list[str]:
    """Return the fields of a process behind its name, which may contain spaces and brackets. [] if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return []

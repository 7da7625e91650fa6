"""Shared memory of this test process and its descendants, identified by a tag in the segments' names.

A segment lives as long as a process has it open or mapped. Ranks close its descriptor once their peers have mapped it. Sessions
keep it mapped.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Container
from pathlib import Path

TAG = os.environ.get("UB_OVERLAP_SHM_TAG", f"tests{os.getpid()}{secrets.token_hex(4)}")
_WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")
if _WORKER and not TAG.endswith(_WORKER):  # a worker of pytest-xdist inherits the tag of pytest, and its ranks the worker's
    TAG += _WORKER
os.environ["UB_OVERLAP_SHM_TAG"] = TAG
_NAME = f"ub_overlap-{TAG}-"


def list_segments() -> set[str]:
    """Return the descriptors of this job's segments that any process has open, and files in /dev/shm with their names."""
    found = {f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if name.startswith(_NAME)}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            for entry in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    if os.readlink(entry.path).startswith(f"/memfd:{_NAME}"):
                        found.add(entry.path)
    return found


def list_mappings(pid: int | str) -> dict[str, int]:
    """Return the bytes of each of this job's segments that a process has mapped."""
    mappings: dict[str, int] = {}
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5].startswith(f"/memfd:{_NAME}"):
                begin, _, end = fields[0].partition("-")
                mappings[fields[5]] = mappings.get(fields[5], 0) + int(end, 16) - int(begin, 16)
    return mappings


def list_processes_with_mappings(segments: Container[str]) -> set[int]:
    """Return the processes that have one of `segments` mapped (keys of list_mappings)."""
    return {
        int(pid) for pid in filter(str.isdigit, os.listdir("/proc")) if any(name in segments for name in list_mappings(pid))
    }

"""Functions of ranks for test_processes.py. This module imports nothing of ub_overlap."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from typing import Any


def state(rank: int, world: int) -> dict[str, Any]:
    """Return what a rank's process has at its start."""
    return {
        "hash": hash("ub_overlap"),
        "imported": [name for name in ("torch", "ub_overlap") if name in sys.modules],
        "session": os.getsid(0) == os.getpid(),
        "variable": os.environ.get("UB_OVERLAP_TEST_VARIABLE"),
        "threads": os.environ["OMP_NUM_THREADS"],
    }


def configure(rank: int, world: int, seconds: float) -> float:
    """Change a deadline and return the one that was in force."""
    from ub_overlap.runtime import settings

    before = settings.current().step_timeout_s
    settings.configure(step_timeout_s=seconds)
    return before


def fail(rank: int, world: int, kind: str) -> None:
    """Raise an error of a class of ub_overlap, or of Python, on all ranks."""
    from ub_overlap.runtime import errors

    if kind == "from":
        try:
            raise errors.PeerTimeoutError("a peer did not arrive", ranks=(1 - rank,))
        except errors.PeerTimeoutError as error:
            raise RuntimeError("the call around it") from error
    if kind == "poisoned":
        raise errors.SessionPoisonedError("an earlier error")
    raise ValueError("a bad argument")


def die(rank: int, world: int) -> None:
    """Abort as glibc does when it finds a corrupted heap, on the last rank."""
    if rank == world - 1:
        os.abort()


def crash(rank: int, world: int) -> None:
    """Read address 8 in a thread that Python does not know, on the last rank."""
    if rank == world - 1:
        library = ctypes.CDLL(None)
        thread = ctypes.c_ulong()
        library.pthread_create(ctypes.byref(thread), None, library.atoi, ctypes.c_void_p(8))
    time.sleep(60)


def fail_alone(rank: int, world: int) -> None:
    """Rank 1 raises while rank 0 waits for it."""
    if rank == 1:
        raise ValueError("alone")
    time.sleep(60)

"""Shared memory segments of this test process and its descendants, identified by a tag in their names."""

from __future__ import annotations

import os
import secrets

TAG = os.environ.setdefault("UB_OVERLAP_SHM_TAG", f"tests{os.getpid()}{secrets.token_hex(4)}")


def list_segments() -> set[str]:
    """Return the names in /dev/shm of this job's segments."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(f"ub_overlap-{TAG}-")}

"""Measured device profiles on disk: one file per machine and group size, in the user's cache directory."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

from . import plan_store
from .machine import KEY, differing_fields


def directory() -> Path:
    """Return $UB_OVERLAP_CACHE_DIR/profiles, else ~/.cache/ub_overlap/profiles (XDG_CACHE_HOME as for plans)."""
    return plan_store.directory().parent / "profiles"


def path_of(key: dict[str, Any]) -> Path:
    """Return the file of a key."""
    name = re.sub(r"[^a-z0-9]+", "-", str(key.get("gpu", "")).lower()).strip("-") or "unknown"
    text = json.dumps([key.get(field) for field in KEY])
    return directory() / f"{name}-tp{key.get('ranks')}-{hashlib.sha256(text.encode()).hexdigest()[:8]}.json"


def write(path: Path, text: str) -> None:
    """Replace `path` atomically, one process at a time: readers see the old text or the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / f".{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        fd, name = tempfile.mkstemp(dir=path.parent, prefix=".profile-")
        try:
            with os.fdopen(fd, "w") as f:
                f.write(text)
            os.replace(name, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
            raise


def find_profiles(key: dict[str, Any]) -> tuple[list[tuple[int, Path]], list[str]]:
    """Return [(ranks, file)] of this machine's profiles, and why other profiles do not match, both in file order.

    The second list has unreadable files and profiles of the same GPU under other versions.
    """
    matching: list[tuple[int, Path]] = []
    rejected: list[str] = []
    paths: list[Path] = []
    with contextlib.suppress(OSError, RuntimeError):  # the directory is missing or unreadable; no home directory
        paths = sorted(directory().glob("*.json"))
    for path in paths:
        try:
            profile_key = json.loads(path.read_text())["key"]
            differing = differing_fields(key, dict(profile_key))
            ranks = int(profile_key["ranks"])
            if ranks < 1:
                raise ValueError(ranks)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            rejected.append(f"{path}: not a profile")
            continue
        if not differing:
            matching.append((ranks, path))
        elif profile_key.get("gpu") == key.get("gpu") and profile_key.get("device") == key.get("device"):
            details = ", ".join(f"{name} {profile_key.get(name)!r}, here {key.get(name)!r}" for name in differing)
            rejected.append(f"{path}: made with {details}")
    return matching, rejected

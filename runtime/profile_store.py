"""Measured device profiles on disk: one file per machine and group size, in the user's cache directory."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from . import plan_store, stored_file
from .machine import KEY, differing_fields


def directory() -> Path:
    """Return $UB_OVERLAP_CACHE_DIR/profiles, else ~/.cache/ub_overlap/profiles (XDG_CACHE_HOME as for plans)."""
    return plan_store.directory().parent / "profiles"


def path_of(key: dict[str, Any]) -> Path:
    """Return the file of a key."""
    name = stored_file.as_file_name(str(key.get("gpu", "")))
    text = json.dumps([key.get(field) for field in KEY])
    return directory() / f"{name}-tp{key.get('ranks')}-{hashlib.sha256(text.encode()).hexdigest()[:8]}.json"


def find_profiles(key: dict[str, Any]) -> tuple[list[tuple[int, Path]], list[str]]:
    """Return [(ranks, file)] of this machine's profiles, and why other profiles do not match, both in file order.

    The second list has unreadable files and profiles of the same GPU under other versions.
    """
    matching: list[tuple[int, Path]] = []
    rejected: list[str] = []
    paths: list[Path] = []
    with contextlib.suppress(OSError, RuntimeError):  # the directory is missing or unreadable; no home directory
        # Without FIFOs: to open one would block for ever.
        paths = sorted(path for path in directory().glob("*.json") if os.path.isfile(path))
    for path in paths:
        try:
            profile_key = stored_file.read_json(path)["key"]
            differing = differing_fields(key, dict(profile_key))
            ranks = int(profile_key["ranks"])
            if ranks < 1:
                raise ValueError(ranks)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            rejected.append(f"{path}: not a profile")
            continue
        if not differing:
            matching.append((ranks, path))
        elif profile_key.get("gpu") == key.get("gpu") and profile_key.get("device") == key.get("device"):
            details = ", ".join(f"{name} {profile_key.get(name)!r}, here {key.get(name)!r}" for name in differing)
            rejected.append(f"{path}: made with {details}")
    return matching, rejected

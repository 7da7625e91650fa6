"""Where measured profiles are kept: one file a machine and group size, in the user's cache directory."""

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
from .machine import KEY, same_machine


def directory() -> Path:
    """$UB_OVERLAP_CACHE_DIR/profiles, else ~/.cache/ub_overlap/profiles (XDG_CACHE_HOME as for plans)."""
    return plan_store.directory().parent / "profiles"


def path_of(key: dict[str, Any]) -> Path:
    """The file of a key."""
    name = re.sub(r"[^a-z0-9]+", "-", str(key.get("gpu", "")).lower()).strip("-") or "unknown"
    text = json.dumps([key.get(field) for field in KEY])
    return directory() / f"{name}-tp{key.get('ranks')}-{hashlib.sha256(text.encode()).hexdigest()[:8]}.json"


def write(path: Path, text: str) -> None:
    """Replace `path` as a whole, one process at a time: readers see the old text or the new."""
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


def found(key: dict[str, Any]) -> tuple[list[tuple[int, Path]], list[str]]:
    """([(ranks, file)] of profiles of the machine of `key`, why others of the same GPU are not), both in order of names."""
    mine: list[tuple[int, Path]] = []
    others: list[str] = []
    paths: list[Path] = []
    with contextlib.suppress(OSError, RuntimeError):  # a directory that is not there or not ours to read; no home at all
        paths = sorted(directory().glob("*.json"))
    for path in paths:
        try:
            theirs = json.loads(path.read_text())["key"]
            differ = same_machine(key, dict(theirs))
            ranks = int(theirs["ranks"])
            if ranks < 1:
                raise ValueError(ranks)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            others.append(f"{path}: not a profile")
            continue
        if not differ:
            mine.append((ranks, path))
        elif theirs.get("gpu") == key.get("gpu") and theirs.get("device") == key.get("device"):
            told = ", ".join(f"{name} {theirs.get(name)!r}, here {key.get(name)!r}" for name in differ)
            others.append(f"{path}: made with {told}")
    return mine, others

"""Plans on disk by digest, with the graphs before and after the rewrite.

A warm compile cache, the session's mismatch error and the command line read the plans. Only ub_overlap.compiler.diff reads the
graphs, which are opaque bytes here. A compile-cache hit skips the pass that made the plan, but every op in the cached code
still names the plan's digest. So the plan text is stored next to the caches, under its digest, and written once.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path

from . import stored_file

log = logging.getLogger(__name__)

_DIGEST = re.compile(r"[0-9a-f]{8,64}(-[0-9a-f]{1,16})?\Z")
_JSON_FILE, _GRAPHS_FILE = re.compile(r"[0-9a-f-]+\.json"), re.compile(r"[0-9a-f-]+\.graphs")
MOST_FILES = 8192
MOST_BYTES = 512 << 20
"""What stays of each kind. A plan that was removed is missing from reports of warm compile caches."""


def directory() -> Path:
    """Return $UB_OVERLAP_CACHE_DIR/plans, else $XDG_CACHE_HOME/ub_overlap/plans, else ~/.cache/ub_overlap/plans.

    FileNotFoundError for a user without a home folder, as in containers with a numeric user: nothing is stored then."""
    root = os.environ.get("UB_OVERLAP_CACHE_DIR")
    if root:
        return Path(root) / "plans"
    cache = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(cache) if cache else Path.home() / ".cache") / "ub_overlap" / "plans"
    except RuntimeError:
        raise FileNotFoundError(errno.ENOENT, "no home folder; set UB_OVERLAP_CACHE_DIR", "~/.cache") from None


_logged: set[tuple[str, int | None]] = set()


def log_unsaved(what: str, digest: str, effect: str, error: OSError) -> None:
    """Log once per kind of object and cause that this process stores nothing. `effect`: what does not work then."""
    if (what, error.errno) not in _logged:
        _logged.add((what, error.errno))
        log.warning("could not store the %s of plan %s; %s (said once): %s", what, digest, effect, error)


def is_digest(text: str) -> bool:
    """Return whether `text` has the form of a plan digest. Sites of plain functions have no plan."""
    return _DIGEST.match(text) is not None


def path_of(digest: str) -> Path:
    """Return the file of a plan."""
    if not is_digest(digest):
        raise ValueError(f"plan digest {digest!r}: expected 8 to 64 hexadecimal digits, and those of its own part")
    return directory() / f"{digest}.json"


def graphs_path_of(digest: str) -> Path:
    """Return the file of a plan's graphs."""
    return path_of(digest).with_suffix(".graphs")


def save(digest: str, text: str) -> Path:
    """Write `text` under `digest`. The first call of a process removes the oldest plans where there are too many."""
    path = stored_file.write(path_of(digest), text)
    bound(path.parent)
    return path


@functools.cache
def bound(folder: Path) -> None:
    """Remove the oldest files of a folder whose files are named by digests, at the first call of a process."""
    for name in (_JSON_FILE, _GRAPHS_FILE):
        stored_file.remove_oldest(folder, name, MOST_FILES, MOST_BYTES)


def save_graphs(digest: str, data: bytes) -> Path:
    """Write the graphs of a plan."""
    return stored_file.write(graphs_path_of(digest), data)


def load(digest: str) -> str | None:
    """Return the plan's JSON text, None where this machine has none under `digest`."""
    data = _read(path_of, digest)
    return None if data is None else data.decode(errors="replace")


def find_digest(shared: str) -> str:
    """Return the digest of the newest stored plan with a shared part; `shared` itself where there is none.

    Errors and peers know no other part. What they ask about is equal in all such plans.
    """
    try:
        folder = directory()
    except FileNotFoundError:
        return shared
    found = [path for path in folder.glob(f"{shared}-*.json")] if is_digest(shared) and folder.is_dir() else []
    return max(found, key=_changed).stem if found else shared


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # removed since
        return 0.0


def load_graphs(digest: str) -> bytes | None:
    """Return the graphs of a plan, None where this machine has none under `digest`."""
    return _read(graphs_path_of, digest)


def _read(locate: Callable[[str], Path], digest: str) -> bytes | None:
    try:
        path = locate(digest)
    except FileNotFoundError:  # no home folder
        return None
    # isfile is False, too, for a folder that is not ours to read: then there are no stored plans. A FIFO would block for ever.
    return stored_file.read_bytes(path) if os.path.isfile(path) else None

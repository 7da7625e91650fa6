"""The flight recorder: the last calls of every group, as data, and in a file after an error or on SIGUSR1.

C++ records each call (csrc/core/flight.h). Here the records of all groups become one JSON file per process, in one folder for
all ranks: $UB_OVERLAP_FLIGHT_DIR, else `flight` in the cache folder. Hosts may share the folder, so file names have the host.
`python -m ub_overlap doctor --flight DIR` merges the files of all ranks. The file has

    {"version": 1, "rank": 0, "pid": 4711, "host": "node1", "time": 1.7e9, "reason": "PeerTimeoutError: ...", "groups": [...]}

with `flight_record()` as its groups.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from .. import errors, plan_store, settings, stored_file
from ..extension import extension
from .abort_signal import AbortSignal, signals
from .daemon_thread import run_in_daemon_thread
from .group_argument import Group, name_of

log = logging.getLogger("ub_overlap.runtime")

VERSION = 1
KEPT_FILES = 64
KEPT_S = 86400.0
"""The newest files of a host are kept, and those younger than a day: one fault may write a file for each of many ranks."""
MOST_FILES = 4096
MOST_BYTES = 256 << 20
"""What a host keeps at most, however young."""
FIELDS = ("number", "epoch", "state", "op", "site", "strategy", "shapes", "enqueued_s", "started_s", "ended_s")
"""Of a call. Times: seconds since 1970, 0 where the call is not there yet."""
_DUMPED = (errors.RankError, errors.GroupAbortedError, errors.ArenaError)
_WRITE_S = 2.0
"""Seconds that a file may take. A folder on a network may hang, and the error that the file is for must not wait for that."""
_lock = threading.Lock()


class _Last:
    """The last file that this process wrote."""

    path = ""
    owns_signal = False


def flight_record(group: Group = None) -> list[dict[str, Any]]:
    """Return the last calls of `group`, or of every group of this process where it is None.

    One dict per group and device type: "group", "id" (equal on all ranks), "device", "rank", "ranks" (how many), "transport",
    "members" (ranks), "calls" (made so far), "waiting_for" (ranks, now) and "records": the last calls, oldest first, each a
    dict of

    - number, epoch: the count of the group's calls, and of those on its own transport
    - state: "enqueued" (waits for its plan or memory), "issued" (on the GPU's stream), "started", "finished" or "failed"
    - op, site, strategy, shapes
    - enqueued_s, started_s, ended_s: host times in seconds since 1970; 0: not yet, or not known. "started" on a GPU: issued

    Ranks are those of the group that the user named, also in its parts, which hierarchical collectives use.
    The setting `flight_calls` is the number of calls that are kept. Any thread may call this, also while an op waits.
    """
    name = None if group is None else name_of(group)
    return [_describe(signal) for signal in signals() if name is None or signal.group == name]


def _describe(signal: AbortSignal) -> dict[str, Any]:
    core = signal.core
    row: dict[str, Any] = {"group": signal.group, "id": signal.token, "device": signal.device}
    if core is None:  # its first call waits for the other ranks
        return {**row, "rank": -1, "ranks": 0, "transport": "", "members": [], "calls": 0, "waiting_for": [], "records": []}
    members = signal.origin.ranks if signal.origin else tuple(range(core.ranks))
    return {
        **row,
        "rank": members[core.rank],
        "ranks": core.ranks,
        "transport": core.transport,
        "members": list(members),
        "calls": core.calls,
        "waiting_for": core.waiting_for(),
        "records": [_record(row) for row in core.flight()],
    }


def _record(row: Sequence[Any]) -> dict[str, Any]:
    """Return a call of C++ by field. Nanoseconds become seconds."""
    return dict(zip(FIELDS, (*row[:-3], *(round(ns * 1e-9, 6) for ns in row[-3:])), strict=True))


def folder() -> Path:
    """Return the folder of the files."""
    return Path(settings.current().flight_dir or plan_store.directory().parent / "flight")


def _rank() -> int:
    with contextlib.suppress(Exception):
        if dist.is_initialized():
            return dist.get_rank()
    text = os.environ.get("RANK", "")
    return int(text) if text.isdigit() else -1


def dump(reason: str) -> str:
    """Write the file of this process and return its path, "" where there is nothing to write or it cannot be written."""
    try:
        groups = flight_record() if settings.current().flight_calls else []
        if not groups:
            return ""
        content = {
            "version": VERSION,
            "rank": _rank(),
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "time": time.time(),
            "reason": reason,
            "groups": groups,
        }
        return run_in_daemon_thread("ub_overlap-flight", partial(_write, content)).result(_WRITE_S)
    except Exception:
        log.debug("no flight record", exc_info=True)
        return ""


def _write(content: dict[str, Any]) -> str:
    """Write a file and return its path, "" while an earlier one hangs."""
    if not _lock.acquire(timeout=_WRITE_S):
        return ""
    try:
        name = f"rank{content['rank']}-{_host()}-{content['pid']}.json"
        path = stored_file.write(folder() / name, json.dumps(content, indent=1))
        _Last.path = str(path)
        _remove_old_files(path.parent)
        return str(path)
    finally:
        _lock.release()


def _host() -> str:
    """Return the host as part of a file name."""
    return re.sub(r"[^\w.-]", "_", socket.gethostname())


def _remove_old_files(directory: Path) -> None:
    """Remove old files that this host wrote."""
    name = re.compile(rf"rank-?\d+-{re.escape(_host())}-\d+\.json")
    stored_file.remove_oldest(directory, name, KEPT_FILES, MOST_BYTES, young_s=KEPT_S)
    stored_file.remove_oldest(directory, name, MOST_FILES, MOST_BYTES)


def attach(error: BaseException) -> None:
    """Write a file for an error that a group raises, and note its path in the error. C++ calls this before it raises."""
    if isinstance(error, _DUMPED) and not error.flight_record:
        error.flight_record = dump(f"{type(error).__name__}: {error.what}")
    elif isinstance(error, errors.SessionPoisonedError):
        error.flight_record = _Last.path  # of the first error


def catch_signal() -> None:
    """Make SIGUSR1 write a file, unless the program handles or ignores it, or the setting is off."""
    now = settings.current()
    _Last.owns_signal = bool(now.flight_signal and now.flight_calls and extension().catch_dump_signal())


def release_signal() -> None:
    """Give SIGUSR1 back in a forked child, which has no watchdog."""
    if _Last.owns_signal:
        extension().release_dump_signal()


def dump_if_signalled() -> None:
    """Write a file where SIGUSR1 came. The watchdog calls this: a signal handler must not."""
    if extension().take_dump_signal():
        path = dump("SIGUSR1")
        log.warning("flight record: %s", path or "nothing to write")

"""Process ids of ranks that have compiled a graph, so that a death before the group's first call is seen.

A rank that waits at a first call knows its peers only once they arrive. So each rank leaves its host and pid in the Store of a
group when it compiles a graph with that group. A peer on the same host that waits for this rank looks there once a second.
"""

from __future__ import annotations

import json
import os
import time
import weakref
from collections.abc import Callable
from typing import Any

from ub_overlap import _torch_compat as compat

from .host import has_ended, host_id
from .store_exchange import Exchange

_LOOK_S = 1.0
_announced: weakref.WeakSet[Any] = weakref.WeakSet()


def _key(group: str, rank: int) -> str:
    return f"ub_overlap/processes/{group}/{rank}"


def announce_process(members: Any) -> None:
    """Leave this process's id in the Store of the process group `members`, once."""
    if members in _announced:
        return
    _announced.add(members)
    own = {"host": host_id("cpu"), "pid": os.getpid()}
    compat.store_of(members).set(_key(members.group_name, members.rank()), json.dumps(own))


def watch_processes(exchange: Exchange, topic: str) -> Callable[[], None]:
    """Return a check for a wait on `topic`: PeerTimeoutError for a peer that has compiled on this host and is gone."""
    last, host = time.monotonic(), host_id("cpu")

    def check() -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < _LOOK_S:
            return
        last = now
        for rank in range(exchange.ranks):
            process = exchange.read_key(_key(exchange.group, rank)) if rank != exchange.rank else None
            if process and process["host"] == host and has_ended(process["pid"]):
                raise exchange.gone_error(rank, topic)

    return check

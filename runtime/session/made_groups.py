"""Process groups that this library makes. Every wait for the other ranks has the init deadline and ends with an abort.

c10d waits for them inside the constructor of a backend: by its own deadline, 30 minutes by default, and deaf to an abort.
So the ranks first meet through the Store of the group that theirs is made from, where an error names those that are missing.
Then the constructors run on a thread of their own (group_creation.py).
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from ub_overlap import _c10d_compat

from . import abort_signal, host_groups
from .abort_signal import AbortSignal
from .group_creation import create, creation_limit
from .presence import watch_processes
from .store_exchange import Exchange

MEETING = "groups"
"""Stands for the device type in the keys of a Store, apart from those of sessions."""


def make_group_like(group: Any, backend: str, timeout: timedelta, description: str, op: str) -> Any:
    """Return a new process group with the ranks of `group`, in the same order. Collective over those ranks alone.

    `timeout`: of its collectives. `op`: what makes it, for errors. PeerTimeoutError names ranks that do not arrive,
    PeerFailedError one that failed meanwhile; GroupAbortedError where `group` is aborted.
    """
    name = group.group_name
    where = f"{op} of group '{name}'"
    abort = abort_signal.new_signal(name, MEETING, group, where)
    if group.size() > 1:
        exchange = Exchange(host_groups.store_of(group), name, MEETING, group.rank(), group.size(), op, "make_group", abort)
        try:
            exchange.gather("made", {}, "init", where, watch_processes(exchange, "made"))
            return _make(group, backend, timeout, description, abort, where)
        except BaseException as error:  # also Ctrl-C: the peers need not wait for this rank
            exchange.fail_with(error)
            raise
    return _make(group, backend, timeout, description, abort, where)


def _make(group: Any, backend: str, timeout: timedelta, description: str, abort: AbortSignal, where: str) -> Any:
    def body() -> Any:
        return _c10d_compat.new_group_like(group, backend, creation_limit(), timeout, description)

    return create(body, abort, range(group.size()), group.group_name, where)

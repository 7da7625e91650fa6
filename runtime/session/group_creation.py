"""Constructors of c10d's backends on a thread of their own: they wait for the other ranks, and are deaf to an abort."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

from .. import errors, settings
from .abort_signal import AbortSignal
from .daemon_thread import on_current_device, run_in_daemon_thread

T = TypeVar("T")


def creation_limit() -> timedelta:
    """Return how long the backends of a new group wait for the other ranks."""
    return timedelta(seconds=settings.current().init_timeout_s)


def create(body: Callable[[], T], abort: AbortSignal, ranks: Sequence[int], origin: str, where: str, fix: str = "") -> T:
    """Return the result of `body`, which makes a process group of `ranks` of the group `origin`, or its backends.

    CollectiveError where c10d fails, or does not end by the deadline; GroupAbortedError where `abort` is set.
    """
    limit = creation_limit()
    outcome = run_in_daemon_thread("ub_overlap-group", on_current_device(body))
    try:
        return abort.result(outcome, 1.25 * limit.total_seconds(), where)  # c10d has its own deadline, but not everywhere
    except errors.UbOverlapError:
        raise
    except (RuntimeError, TimeoutError) as failure:  # RuntimeError: base class of c10d's errors
        raise errors.CollectiveError(
            f"the process group of ranks {list(ranks)} of group '{origin}' could not be made",
            where=where,
            got=str(failure).partition("\n")[0] or "no end",
            expected=f"all of them make it within {limit.total_seconds():g} s",
            fix=fix or f"look at the logs of the other ranks; if they are only slow, {settings.advise('init_timeout_s')}",
        ) from failure

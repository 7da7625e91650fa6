"""Rank functions of test_abort.py."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

import ub_overlap
from ub_overlap.runtime import settings
from ub_overlap.runtime.session.store_exchange import Exchange

from .rank_failures import attempt
from .rank_sessions import gather, reset

LATE = 0.5
"""Seconds until the abort: the waits have begun by then."""
PLAN = "dddddddd44444444"


def _aborting_later(group: Any, body: Callable[[], Any]) -> list[dict[str, Any]]:
    """Abort `group` twice from another thread while `body` waits. Return the errors of `body` and of a second call."""

    def abort() -> None:
        time.sleep(LATE)
        ub_overlap.abort(group, reason="the scheduler said so")
        ub_overlap.abort(group)

    thread = threading.Thread(target=abort, name="supervisor")
    thread.start()
    found = [attempt(body)]
    thread.join()
    return [*found, attempt(body)]


def within(rank: int, world: int, where: str) -> list[dict[str, Any]]:
    """Rank 0 aborts while its ops wait for the last rank, which comes late. The ranks between wait too."""
    group = dist.new_group(list(range(world)))
    name = group.group_name
    with reset():
        settings.configure(step_timeout_s=60.0, init_timeout_s=60.0)
        if where != "bind":
            gather(name, rank, world, 4)
        dist.barrier()
        rows = 300_000 if where == "growth" else 4

        def body() -> None:
            gather(name, rank, world, rows, site=f"{PLAN}/forward.0" if where == "plan check" else "/g")

        if rank == 0:
            found = _aborting_later(group, body)
        else:
            if rank == world - 1:
                time.sleep(3 * LATE)
            found = [attempt(body) for _ in range(1 if where == "bind" else 2)]  # a failed bind may be tried again
        dist.barrier()
        return found


def before_the_first_op(rank: int, world: int) -> list[dict[str, Any]]:
    """Rank 0 aborts a group that it never used, while the others wait in their first op."""
    group = dist.new_group(list(range(world)))
    with reset():
        settings.configure(step_timeout_s=60.0, init_timeout_s=60.0)
        if rank == 0:
            time.sleep(LATE)
            ub_overlap.abort(group)
            ub_overlap.abort(group.group_name)
        found = [attempt(lambda: gather(group.group_name, rank, world, 4))]
        dist.barrier()
        return found


def after_destroy(rank: int, world: int) -> list[dict[str, Any]]:
    """Abort a destroyed group, then use a new one. Then abort a group with a hanging Store and all other groups."""
    group = dist.new_group(list(range(world)))
    gather(group.group_name, rank, world, 4)
    dist.destroy_process_group(group)
    found = [attempt(lambda: ub_overlap.abort(group)), attempt(lambda: ub_overlap.abort(group))]
    again = dist.new_group(list(range(world)))
    wrong = gather(again.group_name, rank, world, 4)
    assert not wrong, wrong
    found.append(attempt(lambda: ub_overlap.abort("no such group")))
    dist.barrier()
    ub_overlap.abort()
    return [*found, attempt(lambda: gather(again.group_name, rank, world, 4))]


def with_a_hanging_store(rank: int, world: int) -> dict[str, Any]:
    """The Store does not answer. Rank 0 waits for it in its first op and aborts."""
    group = dist.new_group(list(range(world)))
    if rank == 0:
        collect, hang = Exchange._collect, threading.Event()

        def stuck(self: Exchange, *args: Any) -> None:
            hang.wait(60)

        Exchange._collect = stuck  # type: ignore[method-assign]
        try:
            with reset():
                settings.configure(init_timeout_s=60.0)
                found = _aborting_later(group, lambda: gather(group.group_name, rank, world, 4))[0]
        finally:
            Exchange._collect = collect  # type: ignore[method-assign]
            hang.set()
    else:
        found = {}
    dist.barrier()
    return found

"""Run work that may block forever without blocking its caller."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import TypeVar

from .. import errors

T = TypeVar("T")


def run_in_daemon_thread(name: str, body: Callable[[], T]) -> Future[T]:
    """Run `body` on a new daemon thread. The future holds its result or its exception, unless its waiter has set one.

    UbOverlapError where the thread cannot be started.
    """
    outcome = Future[T]()

    def run() -> None:
        with contextlib.suppress(InvalidStateError):
            try:
                outcome.set_result(body())
            except InvalidStateError:
                raise
            except BaseException as error:  # noqa: BLE001  (raised again by the thread that waits)
                outcome.set_exception(error)

    start_thread(threading.Thread(target=run, name=name, daemon=True))
    return outcome


def on_current_device(body: Callable[[], T]) -> Callable[[], T]:
    """Return `body` for another thread, which would start with GPU 0 as its current device."""
    import torch

    if not torch.cuda.is_initialized():
        return body
    device = torch.cuda.current_device()

    def run() -> T:
        with torch.cuda.device(device):
            return body()

    return run


def start_thread(thread: threading.Thread) -> None:
    """Start `thread`. UbOverlapError where the system refuses it: a RuntimeError alone would look like one of c10d."""
    try:
        thread.start()
    except RuntimeError as refused:
        raise errors.UbOverlapError(
            f"the thread '{thread.name}' cannot be started",
            where=f"process {os.getpid()}",
            got=str(refused),
            expected="room for one more thread and its stack",
            fix="raise the limit of processes (ulimit -u, pids.max of the container) or of memory (ulimit -v)",
        ) from refused

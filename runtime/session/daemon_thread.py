"""Run work that may block forever without blocking its caller."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import TypeVar

T = TypeVar("T")


def run_in_daemon_thread(name: str, body: Callable[[], T]) -> Future[T]:
    """Run `body` on a new daemon thread. The future holds its result or its exception, unless its waiter has set one."""
    outcome = Future[T]()

    def run() -> None:
        with contextlib.suppress(InvalidStateError):
            try:
                outcome.set_result(body())
            except InvalidStateError:
                raise
            except BaseException as error:  # noqa: BLE001  (raised again by the thread that waits)
                outcome.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return outcome

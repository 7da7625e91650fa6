"""Work that may block for ever, and must not take its caller with it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def apart(name: str, body: Callable[[], T]) -> Future[T]:
    """Runs `body` on a daemon thread of its own; what it returns or raises is the future's."""
    outcome = Future[T]()

    def run() -> None:
        try:
            outcome.set_result(body())
        except BaseException as error:  # noqa: BLE001  (raised again by the thread that waits)
            outcome.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return outcome

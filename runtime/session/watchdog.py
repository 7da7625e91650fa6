"""Log failed groups even where no thread calls an op: the process may only replay CUDA graphs, or block in
torch.cuda.synchronize().

One daemon thread starts before the first session of several ranks is made: SIGUSR1 works while ranks wait there. Four times a
second it reads every session's failure record. It logs a failure once, with the full text, as an error of the logger
"ub_overlap.runtime". It only reads the record (csrc/core/arena.h), so the next op on the group and `check_errors()` still
raise the error.

It also frees the memory of destroyed groups. torch has no hook for destroy_process_group(), and programs keep references to
destroyed groups, so finalizers of group objects would come late. And it writes a flight record after SIGUSR1 (flight.py), and
ends waits of a GPU for a rank whose process is gone.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

from .. import errors
from ..extension import extension
from . import abort_signal, flight
from .daemon_thread import run_in_daemon_thread, start_thread

log = logging.getLogger("ub_overlap.runtime")

_CLOSE_S = 10.0
"""Seconds that `stop` waits for threads that free memory."""


class Watchdog:
    """Polls objects with `group` and `pending_error() -> Exception | None`. Holds them weakly.

    `on_start`: called before the thread starts. `on_poll`: called by the thread each time.
    """

    def __init__(
        self, period_s: float = 0.25, on_start: Callable[[], None] | None = None, on_poll: Callable[[], None] | None = None
    ) -> None:
        self.period_s = period_s
        self._on_start, self._on_poll = on_start, [on_poll] if on_poll else []
        self._lock = threading.Lock()
        self._watched: weakref.WeakSet[Any] = weakref.WeakSet()
        self._failed: weakref.WeakSet[Any] = weakref.WeakSet()
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._closing: list[Future[None]] = []

    def watch(self, session: Any) -> None:
        """Poll `session` too. Start the thread where it does not run."""
        with self._lock:
            self._watched.add(session)
        self.start()

    def start(self) -> None:
        """Start the thread where it does not run. It ends when there is no session, also none in the making."""
        with self._lock:
            if self._thread is None:
                self._stopping = threading.Event()
                if self._on_start:
                    self._on_start()
                atexit.unregister(self.stop)
                # Runs before handlers registered earlier: before the sessions close (runtime/ops/__init__.py).
                atexit.register(self.stop)
                name = "ub_overlap-watchdog"
                thread = threading.Thread(target=self._run, args=(self._stopping,), name=name, daemon=True)
                start_thread(thread)
                self._thread = thread  # only now: the next `watch` tries again where the system refuses it

    def call_at_poll(self, callback: Callable[[], None]) -> None:
        """Let the thread call `callback` each time, too. Idempotent."""
        with self._lock:
            if callback not in self._on_poll:
                self._on_poll.append(callback)

    def stop(self) -> None:
        """End the thread and those that free memory. The next `watch` starts it again."""
        with self._lock:
            thread, self._thread = self._thread, None
            self._stopping.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(2.0)
        wait(self._closing, _CLOSE_S)  # a thread inside C++ when the interpreter ends would abort the process

    def reset_after_fork(self) -> None:
        """Drop the parent's sessions in a forked child, which has no thread."""
        self._lock, self._thread = threading.Lock(), None
        self._watched, self._failed = weakref.WeakSet(), weakref.WeakSet()
        self._closing = []

    def _run(self, stopping: threading.Event) -> None:
        while not stopping.wait(self.period_s):
            self.poll()
            if extension().has_destroyed_groups():
                # Closing waits for running calls, on a thread of its own: failures of other groups must not wait.
                with contextlib.suppress(errors.UbOverlapError):  # no room for a thread: at a later poll
                    closing = run_in_daemon_thread("ub_overlap-close", extension().close_destroyed_groups)
                    self._closing = [*(other for other in self._closing if not other.done()), closing]
            with self._lock:
                if stopping.is_set() or not (self._watched or self._failed or abort_signal.signals()):
                    if self._stopping is stopping:
                        self._thread = None
                    return

    def poll(self) -> None:
        """Check every session once. A session that has failed is only watched for its end."""
        with self._lock:
            callbacks = list(self._on_poll)
        for callback in callbacks:
            callback()
        with self._lock:
            sessions = [session for session in self._watched if session not in self._failed]
        for session in sessions:
            try:
                error: Exception | None = session.pending_error()
            except Exception as failure:  # noqa: BLE001  (the other sessions are still watched)
                error = failure
            if error is not None:
                with self._lock:
                    self._watched.discard(session)
                    self._failed.add(session)
                if not isinstance(error, errors.GroupAbortedError):  # logged by `abort`
                    log.error("group '%s' has failed: %s: %s", session.group, type(error).__name__, error)


_watchdog = Watchdog(on_start=flight.catch_signal, on_poll=flight.dump_if_signalled)
start, watch, call_at_poll = _watchdog.start, _watchdog.watch, _watchdog.call_at_poll
os.register_at_fork(after_in_child=_watchdog.reset_after_fork)
os.register_at_fork(after_in_child=flight.release_signal)

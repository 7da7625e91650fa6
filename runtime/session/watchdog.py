"""Says in the log that a group has failed, also while nobody asks: the process may only replay CUDA graphs, or block in
torch.cuda.synchronize().

One daemon thread, started with the first session that has an arena, looks at every session's failure record four times a
second and logs what it finds once, with the full text, as an error of the logger "ub_overlap.runtime". It takes nothing away:
the next op on the group and `check_errors()` still raise the error itself (looking only reads the record, see csrc/core/arena.h).
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from typing import Any

log = logging.getLogger("ub_overlap.runtime")


class Watchdog:
    """Watches things with `group` and `trouble() -> Exception | None`; holds them weakly."""

    def __init__(self, period_s: float = 0.25) -> None:
        self.period_s = period_s
        self._lock = threading.Lock()
        self._watched: weakref.WeakSet[Any] = weakref.WeakSet()
        self._thread: threading.Thread | None = None
        self._over = threading.Event()

    def watch(self, session: Any) -> None:
        with self._lock:
            self._watched.add(session)
            if self._thread is None:
                self._over = threading.Event()
                atexit.unregister(self.stop)
                atexit.register(
                    self.stop
                )  # runs before what is registered already: the sessions' own end (runtime/ops/__init__.py)
                self._thread = threading.Thread(target=self._run, args=(self._over,), name="ub_overlap-watchdog", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """Ends the thread; another `watch` starts it again."""
        with self._lock:
            thread, self._thread = self._thread, None
            self._over.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(2.0)

    def forget(self) -> None:
        """In a forked child: it has no thread, and its parent's sessions are none of its business."""
        self._lock, self._watched, self._thread = threading.Lock(), weakref.WeakSet(), None

    def _run(self, over: threading.Event) -> None:
        while not over.wait(self.period_s):
            self.look()
            with self._lock:
                if over.is_set() or not len(self._watched):
                    if self._over is over:
                        self._thread = None
                    return

    def look(self) -> None:
        """One round; a session that has failed is not watched any more."""
        with self._lock:
            sessions = list(self._watched)
        for session in sessions:
            try:
                error: Exception | None = session.trouble()
            except Exception as other:  # noqa: BLE001  (the other sessions go on being watched)
                error = other
            if error is not None:
                with self._lock:
                    self._watched.discard(session)
                log.error("group '%s' has failed: %s: %s", session.group, type(error).__name__, error)


_one = Watchdog()
watch = _one.watch
os.register_at_fork(after_in_child=_one.forget)

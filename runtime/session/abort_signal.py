"""Abort of a group's waits from another thread.

Each session has a signal, which exists before the session does: a first call waits for the Store and for torch's rendezvous.
`set` ends such waits with GroupAbortedError and aborts the session (csrc/core/session.h), which ends its call's waits. A group
that is aborted before its first call has no signal. It is marked instead, and its ranks learn of it through the Store.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from concurrent.futures import Future, InvalidStateError
from typing import Any, TypeVar

from .. import errors
from .origin import Origin
from .wait_limit import WaitLimit

T = TypeVar("T")
_POLL_S = 0.25


class AbortSignal:
    """The abort of one session of a group on one device type. `members`: its process group, held weakly.

    It also lists the sessions of this process, those in the making included.
    """

    def __init__(self, group: str, device: str = "", members: Any = None) -> None:
        self.group, self.device = group, device
        self.members = weakref.ref(members) if members is not None else lambda: None
        self._lock = threading.RLock()  # reentrant: a signal handler may abort the group whose wait it interrupts
        self._waits: set[Future[Any]] = set()
        self._reason = ""
        self.core: Any = None
        """The C++ session, None while it is being made."""
        self.token = ""
        """A text that is equal on all ranks of the session, and no other session's."""
        self.origin: Origin | None = None
        """The group that the user named, None before the session's ranks are known."""

    def set(self, reason: str) -> bool:
        """End this rank's waits. Do not wait for them. Return False where that was done before."""
        with self._lock:
            if self._reason:
                return False
            self._reason = reason
            waits, core = list(self._waits), self.core
        if core is not None:
            core.abort(reason)
        for wait in waits:
            with contextlib.suppress(InvalidStateError):  # it has just ended
                wait.set_exception(self.error())
        return True

    def attach(self, core: Any) -> None:
        """Take the session that the waits were for. Abort it where the group was aborted meanwhile."""
        with self._lock:
            self.core = core
            reason = self._reason
        if reason:
            core.abort(reason)

    def error(self, where: str = "") -> errors.GroupAbortedError:
        """Return a new error for one wait."""
        return errors.group_aborted(self.group, where=where, reason=self._reason)

    def check(self, where: str = "") -> None:
        """Raise GroupAbortedError where the group was aborted."""
        if self._reason:
            raise self.error(where)

    def result(self, outcome: Future[T], timeout_s: float, where: str = "") -> T:
        """Return the result of `outcome`. TimeoutError after `timeout_s`; GroupAbortedError when the group is aborted."""
        with self._lock:
            self.check(where)
            self._waits.add(outcome)
        deadline = WaitLimit(timeout_s)
        try:
            while True:
                try:
                    return outcome.result(min(_POLL_S, timeout_s))
                except TimeoutError:
                    if outcome.done():  # since the poll, or with a TimeoutError of its own
                        return outcome.result()
                    if deadline.is_over():
                        raise
        except errors.GroupAbortedError:
            raise self.error(where) from None
        finally:
            with self._lock:
                self._waits.discard(outcome)


class _Process:
    """The signals of this process, and the groups that were aborted, by process group object: names are reused."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.signals: weakref.WeakSet[AbortSignal] = weakref.WeakSet()
        self.aborted: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


_process = _Process()


def _reset_after_fork() -> None:
    """Forget the parent's sessions: a child must not abort them."""
    global _process
    _process = _Process()


os.register_at_fork(after_in_child=_reset_after_fork)


def new_signal(group: str, device: str, members: Any, where: str) -> AbortSignal:
    """Return the signal of a session that is about to be made. GroupAbortedError where its group was aborted before."""
    signal = AbortSignal(group, device, members)
    with _process.lock:
        reason = _process.aborted.get(members)
        if reason is not None:
            raise errors.group_aborted(group, where=where, reason=reason)
        _process.signals.add(signal)
    return signal


def mark(members: Any, reason: str) -> bool:
    """Make later sessions of a process group fail. Return False where that was done before."""
    with _process.lock:
        if members in _process.aborted:
            return False
        _process.aborted[members] = reason
        return True


def mark_like(made: Any, origin: Any) -> None:
    """Make later sessions of `made`, a group of ours, fail where the group that it is made from was aborted before."""
    with _process.lock:
        reason = _process.aborted.get(origin)
    if reason is not None:
        mark(made, reason)


def signals() -> list[AbortSignal]:
    """Return the signals of all sessions of this process, those in the making included."""
    with _process.lock:
        return list(_process.signals)

"""Deadlines of Python waits, in time in which this process runs."""

from __future__ import annotations

import time

OVERSLEPT_S = 1.0
"""The most that counts between two polls. A later poll shows that the process, or its machine, was stopped meanwhile.
csrc/cpu/waiter.cpp has the same."""


class WaitLimit:
    """A deadline for a loop that polls several times a second.

    A job that is stopped and continued, or a virtual machine that is suspended, must not find all its deadlines over.
    """

    def __init__(self, seconds: float) -> None:
        self._left, self._last = seconds, time.monotonic()

    def is_over(self) -> bool:
        """Count the time since the last poll and return whether the deadline is over."""
        now = time.monotonic()
        elapsed, self._last = now - self._last, now
        self._left -= min(elapsed, OVERSLEPT_S)  # slow polls count too: else they would never reach the deadline
        return self._left < 0

"""The callable that gives C++ its schedules."""

from __future__ import annotations

import threading
from typing import Any


class ScheduleProvider:
    """Build, prove and encode schedules on demand.

    A new key is also proven to share an arena with every earlier key of its group size, because calls of one group follow each
    other in any order.
    """

    def __init__(self) -> None:
        self._known: set[tuple[Any, ...]] = set()
        self._lock = threading.Lock()  # two threads with a new key each: one of them has to prove the pair

    def __call__(self, key: tuple[Any, ...], rank: int) -> list[tuple[int, ...]]:
        """Return the encoded steps of `rank` for `key`, a `Key` as a plain tuple."""
        from ..schedule.encode import prove_pair, provide

        with self._lock:
            steps = provide(key, rank)
            for other in self._known:
                if other != key and other[1] == key[1]:
                    prove_pair(key, other)
            self._known.add(key)
        return steps

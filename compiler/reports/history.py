"""The plans of this process, by digest: made here, or loaded from the store after a compile-cache hit."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Iterable

from ub_overlap.runtime import plan_store

from ..plan.plan import Plan

log = logging.getLogger(__name__)


class History:
    """Remembers plans in the order in which they were made; the oldest go when there are more than `limit`."""

    def __init__(self, limit: int = 1024) -> None:
        self._limit = limit
        self._plans: OrderedDict[str, Plan] = OrderedDict()
        self._made: deque[tuple[int, str]] = deque(maxlen=limit)
        self._count = 0
        self._lock = threading.Lock()  # Inductor compiles on several threads

    def record(self, plan: Plan) -> None:
        """Keeps `plan` here and, for processes that find its graph in a cache, on disk."""
        with self._lock:
            self._plans[plan.digest] = plan
            self._plans.move_to_end(plan.digest)
            self._made.append((self._count, plan.digest))
            self._count += 1
            while len(self._plans) > self._limit:
                self._plans.popitem(last=False)
        try:
            plan_store.save(plan.digest, plan.to_json())
        except OSError as e:
            log.warning("plan %s is not kept on disk, so a warm cache cannot explain itself: %s", plan.digest, e)

    def mark(self) -> int:
        """A point in time, for `since`."""
        with self._lock:
            return self._count

    def since(self, mark: int) -> list[Plan]:
        """The plans made after `mark`, in order."""
        with self._lock:
            made = dict.fromkeys(digest for number, digest in self._made if number >= mark)
            return [self._plans[d] for d in made if d in self._plans]

    def plans(self) -> list[Plan]:
        with self._lock:
            return list(self._plans.values())

    def find(self, digest: str) -> Plan | None:
        """The plan of this process or of the store."""
        with self._lock:
            if digest in self._plans:
                return self._plans[digest]
        text = plan_store.load(digest)
        return Plan.from_json(text) if text is not None else None

    def found(self, digests: Iterable[str]) -> list[Plan]:
        """Those of `digests` that this process or the store knows, forward plans first."""
        plans = [p for d in dict.fromkeys(digests) if (p := self.find(d)) is not None]
        return sorted(plans, key=lambda p: p.phase != "forward")


HISTORY = History()
"""The one of this process: the passes that fill it are made by torch's hooks, which hand nothing through."""

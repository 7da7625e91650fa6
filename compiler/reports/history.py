"""The plans of this process, by digest: created here, or loaded from the store after a compile-cache hit."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Iterable

from ub_overlap.runtime import plan_store
from ub_overlap.runtime.errors import StoredFileError

from ..plan import plan_files
from ..plan.phase import PHASES
from ..plan.plan import Plan
from ..tokens.token_split import TokenSplit

log = logging.getLogger(__name__)


class History:
    """Plans in the order of their creation. The oldest are evicted when there are more than `limit`."""

    def __init__(self, limit: int = 1024) -> None:
        self._limit = limit
        self._plans: OrderedDict[str, Plan] = OrderedDict()
        self._created: deque[tuple[int, str]] = deque(maxlen=limit)
        self._token_splits: dict[str, tuple[int, TokenSplit]] = {}
        self._count = 0
        self._lock = threading.Lock()  # Inductor compiles on several threads

    def record(self, plan: Plan) -> None:
        """Keep `plan` in memory, and on disk for processes that find its graph in a cache."""
        with self._lock:
            self._plans[plan.digest] = plan
            self._plans.move_to_end(plan.digest)
            self._created.append((self._count, plan.digest))
            self._count += 1
            while len(self._plans) > self._limit:
                self._plans.popitem(last=False)
        try:
            plan_store.save(plan.digest, plan.to_json())
        except OSError as e:
            plan_store.log_unsaved("decisions", plan.digest, "runs with a warm compile cache cannot report them", e)

    def remember(self, plan: Plan) -> None:
        """Keep a stored plan in memory, of a graph that this process runs and has not compiled."""
        with self._lock:
            self._plans.setdefault(plan.digest, plan)

    def record_token_split(self, choice: TokenSplit) -> None:
        """Keep the last choice of each tokenwise layer."""
        with self._lock:
            self._token_splits[choice.layer] = self._count, choice
            self._count += 1

    def token_splits(self, mark: int = 0) -> list[TokenSplit]:
        """Return the choices of tokenwise layers after `mark`, in the order in which the layers were traced first."""
        with self._lock:
            return [choice for number, choice in self._token_splits.values() if number >= mark]

    def mark(self) -> int:
        """Return a point in time, for `since`."""
        with self._lock:
            return self._count

    def since(self, mark: int) -> list[Plan]:
        """Return the plans created after `mark`, in order."""
        with self._lock:
            created = dict.fromkeys(digest for number, digest in self._created if number >= mark)
            return [self._plans[d] for d in created if d in self._plans]

    def plans(self) -> list[Plan]:
        """Return the plans in memory."""
        with self._lock:
            return list(self._plans.values())

    def find(self, digest: str) -> Plan | None:
        """Return a plan from memory or from the store, or None. A damaged file is skipped with a warning."""
        with self._lock:
            if digest in self._plans:
                return self._plans[digest]
        try:
            return plan_files.load_plan(digest)
        except StoredFileError as e:
            log.warning("skipped %s", e.line)
            return None

    def find_all(self, digests: Iterable[str]) -> list[Plan]:
        """Return the plans of `digests` that are in memory or in the store, forward plans first."""
        plans = [p for d in dict.fromkeys(digests) if (p := self.find(d)) is not None]
        return sorted(plans, key=lambda p: PHASES.index(p.phase))


HISTORY = History()
"""The history of this process. A global, because torch's hooks create the passes that fill it and pass nothing through."""

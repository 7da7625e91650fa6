"""The graphs of compiled plans, by digest: kept here, packed, and beside the plan on disk for who runs out of a warm cache."""

from __future__ import annotations

import json
import logging
import threading
import zlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from ub_overlap.runtime import plan_store

from .edits import Diff
from .snapshot import Snapshot

log = logging.getLogger(__name__)
KEPT = 256  # plans whose graphs a process keeps: packed, a node takes about 20 bytes


@dataclass(frozen=True, slots=True)
class Graphs:
    """What one plan was made of, and what became of it. `joint`: the joint graph before and after the joint pass, with the
    forward plan, where that pass changed anything."""

    plan: str
    phase: str
    before: Snapshot
    after: Snapshot
    joint: tuple[Snapshot, Snapshot] | None = None

    def diff(self) -> Diff:
        return Diff(self.before, self.after, self.plan)

    def joint_diff(self) -> Diff | None:
        return Diff(*self.joint, self.plan) if self.joint else None

    def to_dict(self) -> dict[str, Any]:
        joint = [s.to_dict() for s in self.joint] if self.joint else None
        return {
            "plan": self.plan, "phase": self.phase, "before": self.before.to_dict(), "after": self.after.to_dict(),
            "joint": joint,
        }  # fmt: skip

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> Graphs:
        """ValueError or KeyError for what is not one."""
        before, after = Snapshot.from_dict(d["before"]), Snapshot.from_dict(d["after"])
        joint = d.get("joint")
        pair = (Snapshot.from_dict(joint[0]), Snapshot.from_dict(joint[1])) if joint else None
        return cls(d["plan"], d["phase"], before, after, pair)

    def pack(self) -> bytes:
        return zlib.compress(json.dumps(self.to_dict(), separators=(",", ":")).encode(), 1)

    @classmethod
    def unpack(cls, data: bytes) -> Graphs:
        """ValueError for what is not one."""
        try:
            return cls.from_dict(json.loads(zlib.decompress(data)))
        except (zlib.error, KeyError, TypeError) as e:
            raise ValueError(f"not the graphs of a plan: {e}") from e


class Store:
    """Thread-safe: Inductor compiles on several threads."""

    def __init__(self) -> None:
        self._packed: OrderedDict[str, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def record(self, graphs: Graphs) -> None:
        data = graphs.pack()
        with self._lock:
            self._packed[graphs.plan] = data
            self._packed.move_to_end(graphs.plan)
            while len(self._packed) > KEPT:
                self._packed.popitem(last=False)
        try:
            plan_store.save_graphs(graphs.plan, data)
        except OSError as e:
            log.warning("the graphs of plan %s are not kept on disk, so a warm cache cannot show them: %s", graphs.plan, e)

    def find(self, plan: str) -> Graphs | None:
        """The graphs of a plan of this process or of the disk; None where nobody kept any."""
        with self._lock:
            data = self._packed.get(plan)
        if data is None:
            data = plan_store.load_graphs(plan)
        if data is None:
            return None
        try:
            return Graphs.unpack(data)
        except ValueError as e:
            log.warning("the graphs of plan %s cannot be read: %s", plan, e)
            return None


STORE = Store()

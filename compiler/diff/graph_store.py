"""The graphs of compiled plans, by digest: packed in memory, and on disk with the plan, for runs with a warm compile cache."""

from __future__ import annotations

import json
import logging
import threading
import zlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ub_overlap.runtime import plan_store, stored_file
from ub_overlap.runtime.errors import StoredFileError

from ..plan.records import GraphsRecord
from .edits import Diff
from .snapshot import Snapshot

log = logging.getLogger(__name__)
CAPACITY = 256
"""Plans whose graphs a process keeps. A packed node takes about 20 bytes."""


@dataclass(frozen=True, slots=True)
class PlanGraphs:
    """The graph of one plan before and after the rewrite.

    `joint`: the joint graph before and after the joint pass. Only with a forward plan, and if that pass changed the graph.
    """

    plan: str
    phase: str
    before: Snapshot
    after: Snapshot
    joint: tuple[Snapshot, Snapshot] | None = None

    def diff(self) -> Diff:
        """Return the difference that the rewrite made."""
        return Diff(self.before, self.after, self.plan)

    def joint_diff(self) -> Diff | None:
        """Return the difference that the joint pass made, or None."""
        return Diff(*self.joint, self.plan) if self.joint else None

    def to_dict(self) -> dict[str, Any]:
        """Return the snapshots as plain data."""
        joint = [s.to_dict() for s in self.joint] if self.joint else None
        return {
            "plan": self.plan, "phase": self.phase, "before": self.before.to_dict(), "after": self.after.to_dict(),
            "joint": joint,
        }  # fmt: skip

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> PlanGraphs:
        """Read the result of `to_dict`. ValueError names the row that is not a node of the graph."""
        before, after = Snapshot.from_dict(d["before"]), Snapshot.from_dict(d["after"])
        joint = d.get("joint")
        pair = (Snapshot.from_dict(joint[0]), Snapshot.from_dict(joint[1])) if joint else None
        return cls(d["plan"], d["phase"], before, after, pair)

    def pack(self) -> bytes:
        """Return the snapshots as compressed bytes."""
        return zlib.compress(json.dumps(self.to_dict(), separators=(",", ":")).encode(), 1)

    @classmethod
    def unpack(cls, data: bytes, where: str = "the graphs of a plan", limit: int | None = None) -> PlanGraphs:
        """Read the result of `pack`. StoredFileError for other bytes names `where`: their file or rank.

        `limit`: bytes when decompressed, if not those of a file.
        """
        content = stored_file.parse_json(stored_file.inflate(data, where, limit), where)
        return read_graphs(stored_file.validate(content, GraphsRecord, where, "the graphs of a plan"), where)


def read_graphs(d: GraphsRecord, where: str, field: str = "") -> PlanGraphs:
    """Return PlanGraphs.from_dict(d). StoredFileError names the file `where`. `field`: of the file, that has the graphs."""
    try:
        return PlanGraphs.from_dict(d)
    except ValueError as e:
        raise stored_file.bad_field(where, "the graphs of a plan", field, "", str(e)) from e


class GraphStore:
    """The graphs of plans. Thread-safe, as Inductor compiles on several threads."""

    def __init__(self) -> None:
        self._packed: OrderedDict[str, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def record(self, graphs: PlanGraphs) -> None:
        """Keep the graphs in memory and on disk."""
        data = graphs.pack()
        with self._lock:
            self._packed[graphs.plan] = data
            self._packed.move_to_end(graphs.plan)
            while len(self._packed) > CAPACITY:
                self._packed.popitem(last=False)
        try:
            plan_store.save_graphs(graphs.plan, data)
        except OSError as e:
            plan_store.log_unsaved("graphs", graphs.plan, "runs with a warm compile cache cannot show them", e)

    def find(self, plan: str) -> PlanGraphs | None:
        """Return the graphs of a plan from memory or disk, or None. A damaged file is skipped with a warning."""
        with self._lock:
            data = self._packed.get(plan)
        where = f"the graphs of plan {plan}"
        try:
            if data is None and (data := plan_store.load_graphs(plan)) is not None:
                where = str(plan_store.graphs_path_of(plan))
            return PlanGraphs.unpack(data, where) if data is not None else None
        except StoredFileError as e:
            log.warning("skipped %s", e.line)
            return None


STORE = GraphStore()

"""Snapshots that the passes take: before and after a rewrite, and of the joint graph where it changes.

They explain and decide nothing: whatever fails here is logged, and compiling goes on.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence

from torch.fx import Graph

from ..match.collectives import find_collectives
from ..plan.chosen_site import ChosenSite
from ..plan.plan import Plan
from ..reports.summary import artifact
from .graph_store import STORE, Graphs
from .render.text import unified
from .snapshot import Snapshot
from .snapshot_graph import Texts, take

log = logging.getLogger(__name__)


class SnapshotRecorder:
    """One graph while a pass is at it. `on` False: nothing is taken."""

    def __init__(self, graph: Graph, phase: str, on: bool) -> None:
        self._graph, self._phase, self._on = graph, phase, on
        self._lineage, self._texts = uuid.uuid4().hex, Texts()
        self._before: Snapshot | None = None

    def before(self, chosen: Sequence[ChosenSite] = ()) -> None:
        """Takes the graph as it is. `chosen`: the sites that will be rewritten; other collectives
        are marked too, by their numbers."""
        marks: dict[str, str] = {}
        if self._on and self._phase != "joint":
            marks = {c.node.name: f"{self._phase}.{n}" for n, c in enumerate(find_collectives(self._graph))}
            for site in chosen:
                marks |= {member.name: site.id.name for member in site.site.members}
        self._before = self._take("before", marks)

    def after(self) -> tuple[Snapshot, Snapshot] | None:
        """Both snapshots, or None where one is not there."""
        left = {n.name: n.site for n in self._before.nodes if n.site} if self._before else {}
        after = self._take("after", left)
        return (self._before, after) if self._before and after else None

    def _take(self, label: str, sites: dict[str, str]) -> Snapshot | None:
        if not self._on:
            return None
        try:
            return take(self._graph, self._phase, label, sites, self._lineage, self._texts)
        except Exception:  # an explanation must not cost the user his compilation
            log.warning("no snapshot of the %s graph", self._phase, exc_info=True)
            return None


def told(graphs: Graphs) -> str:
    """The diffs of a plan as text."""
    return "\n\n".join(f"{d}\n\n{unified(d)}" for d in (graphs.joint_diff(), graphs.diff()) if d is not None)


class JointSnapshot:
    """What the joint pass leaves for the forward pass of the same graph, which has a plan to keep it under."""

    def __init__(self) -> None:
        self.joint: tuple[Snapshot, Snapshot] | None = None

    def record(self, plan: Plan, taken: tuple[Snapshot, Snapshot] | None) -> None:
        if taken is None:
            return
        joint = None
        if plan.phase == "forward":
            joint, self.joint = self.joint, None
        try:
            graphs = Graphs(plan.digest, plan.phase, *taken, joint)
            STORE.record(graphs)
            artifact(f"diff_{plan.phase}", "string", lambda: told(graphs))
        except Exception:  # as above
            log.warning("the graphs of plan %s are not kept", plan.digest, exc_info=True)

"""The snapshots that the passes take: before and after a rewrite, and of a joint graph that changes.

Snapshots serve explanations only. A failure here is logged, and compilation continues.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence

from torch.fx import Graph

from ..match.collectives import find_collectives
from ..plan.chosen_site import ChosenSite
from ..plan.plan import Plan
from ..reports.summary import trace_artifact
from ..reports.trace_page import trace_page
from .graph_store import STORE, PlanGraphs
from .render.text import unified
from .snapshot import Snapshot
from .snapshot_graph import NodeTexts, snapshot_graph

log = logging.getLogger(__name__)


class SnapshotRecorder:
    """Takes snapshots of one graph before and after a pass. With `on` False it takes none. `input_names`: as in NodeTexts."""

    def __init__(self, graph: Graph, phase: str, on: bool, input_names: Sequence[str] = ()) -> None:
        self._graph, self._phase, self._on = graph, phase, on
        self._lineage, self._texts = uuid.uuid4().hex, NodeTexts(input_names)
        self._before: Snapshot | None = None

    def before(self, chosen: Sequence[ChosenSite] = ()) -> None:
        """Take the snapshot before the pass.

        `chosen`: the sites that will be rewritten. Other collectives are marked too, by their numbers.
        """
        marks: dict[str, str] = {}
        if self._on and self._phase != "joint":
            marks = {c.node.name: f"{self._phase}.{n}" for n, c in enumerate(find_collectives(self._graph))}
            for site in chosen:
                marks |= {member.name: site.id.name for member in site.site.members}
        self._before = self._take("before", marks)

    def after(self) -> tuple[Snapshot, Snapshot] | None:
        """Take the snapshot after the pass. Return both, or None if one is missing."""
        marks = {n.name: n.site for n in self._before.nodes if n.site} if self._before else {}
        after = self._take("after", marks)
        return (self._before, after) if self._before and after else None

    def _take(self, label: str, sites: dict[str, str]) -> Snapshot | None:
        if not self._on:
            return None
        try:
            return snapshot_graph(self._graph, self._phase, label, sites, self._lineage, self._texts)
        except Exception:  # an explanation must not stop the compilation
            log.warning("no snapshot of the %s graph", self._phase, exc_info=True)
            return None


def format_diffs(graphs: PlanGraphs) -> str:
    """Return the diffs of a plan as text."""
    return "\n\n".join(f"{d}\n\n{unified(d)}" for d in (graphs.joint_diff(), graphs.diff()) if d is not None)


class JointSnapshot:
    """Snapshots of a joint graph, kept until the forward pass of the same graph has a plan to store them with.

    `input_names`: as in NodeTexts, for all snapshots of the graph and its parts.
    """

    def __init__(self, input_names: Sequence[str] = ()) -> None:
        self.input_names = input_names
        self.joint: tuple[Snapshot, Snapshot] | None = None

    def record(self, plan: Plan, snapshots: tuple[Snapshot, Snapshot] | None) -> None:
        """Store the snapshots of a rewrite with its plan."""
        if snapshots is None:
            return
        joint = None
        if plan.phase != "backward":
            joint, self.joint = self.joint, None
        try:
            graphs = PlanGraphs(plan.digest, plan.phase, *snapshots, joint)
            STORE.record(graphs)
            trace_artifact(f"diff_{plan.phase}", "string", lambda: format_diffs(graphs))
        except Exception:  # as above
            log.warning("could not store the graphs of plan %s", plan.digest, exc_info=True)
        try:
            trace_page(plan)
        except Exception:  # as above
            log.warning("could not write the page of plan %s", plan.digest, exc_info=True)

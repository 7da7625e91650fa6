"""Read stored reports and plans, and compare two of them. Imports no torch, so that the command line starts quickly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ub_overlap.runtime import stored_file
from ub_overlap.runtime.errors import StoredFileError

from ..plan.records import PlanRecord, ReportRecord, as_record
from .edits import Diff
from .graph_store import STORE, PlanGraphs, read_graphs
from .snapshot import Snapshot

_COMPARED = ("kind", "strategy", "reason", "group", "ranks", "dtype", "shapes", "module")
"""The fields of a site that two runs are compared by."""


def read_report(path: str | Path) -> dict[str, Any]:
    """Read a report of Report.to_json, a stored plan with its graphs, or a plan of `plan --save`.

    StoredFileError for other files. It says what the file is, if it is another one of ours.
    """
    where = str(path)
    content = stored_file.read_json(path, "JSON of Report.to_json(), or a stored plan")
    if not isinstance(content, dict) or not isinstance(content.get("sites"), list) or "block" in content:
        what, fix = _other_kind(content)
        raise StoredFileError(
            "not a report" + (f", but {what}" if what else ""), where=where,
            expected="JSON of Report.to_json(), or a stored plan", fix=fix or "write one with explain(model)(...).to_json()",
        )  # fmt: skip
    report: dict[str, Any]
    if "digest" in content:
        report = _of_plan(as_record(content, PlanRecord, where, "a plan"))
    else:
        report = {**_EMPTY, **as_record(content, ReportRecord, where, "a report")}
    for number, graphs in enumerate(report["graphs"]):
        read_graphs(graphs, where, f"graphs[{number}]")
    return report


_EMPTY: dict[str, Any] = {"profile": "", "summary": "", "totals": "", "lanes": {}, "graphs": [], "casts": []}
"""What a saved plan does not have."""


def _other_kind(content: Any) -> tuple[str, str]:
    """Return what a file is that is not a report, and what to do with it; ("", "") where that is unknown."""
    keys = set(content) if isinstance(content, dict) else set()
    if isinstance(content, list) or keys == {"rules"} or any("fprop" in k or "*" in k for k in keys):
        return "rules of the option overrides", "python -m ub_overlap plan --overrides FILE, or options={'overrides': FILE}"
    if "block" in keys:
        return "a prediction of plan --json", "plan --html FILE shows it as a page, plan --save FILE writes a plan"
    if "format" in keys and "compute" in keys:
        return "a device profile", "python -m ub_overlap plan --profile FILE"
    if "tuned" in keys:
        return "results of autotune", "they are read by options={'autotune': True}"
    if "traceEvents" in keys:
        return "a profiler trace", "python -m ub_overlap exposed FILE"
    return "", ""


def _of_plan(plan: PlanRecord) -> dict[str, Any]:
    """A stored plan as a report, without run-time figures."""
    digest = plan["digest"]
    graphs = STORE.find(digest)
    sites = [{**site, "plan": digest} for site in plan["sites"]]
    return {
        **_EMPTY, "version": 1, "plans": [digest], "sites": sites, "profile": plan.get("profile", ""),
        "casts": plan.get("casts", []), "graphs": [graphs.to_dict()] if graphs else [],
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class SiteChange:
    """A site that differs between two runs. `fields`: (name, in the first, in the second)."""

    site: str
    fields: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two reports compared: their graphs before and after the rewrite, and their decisions."""

    before: list[Diff]
    after: list[Diff]
    sites: list[SiteChange]
    missing: str = ""
    """The graphs that only one of them has, as text."""

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not self.sites and not self.missing and all(d.same for d in (*self.before, *self.after))

    @property
    def shown(self) -> list[Diff]:
        """The diffs to show: of graphs that differ before the rewrite; else of those that differ after it."""
        return [d for d in self.before if not d.same] or [d for d in self.after if not d.same]

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as plain data."""
        return {
            "same": self.same,
            "missing": self.missing,
            "sites": [{"site": s.site, **{f: [a, b] for f, a, b in s.fields}} for s in self.sites],
            "before": [d.to_dict() for d in self.before],
            "after": [d.to_dict() for d in self.after],
        }


def compare_reports(a: Mapping[str, Any], b: Mapping[str, Any], names: tuple[str, str]) -> Comparison:
    """Compare two reports. Their graphs are paired by phase, in order."""
    phases_a, phases_b = _by_phase(a), _by_phase(b)
    before, after, missing = [], [], []
    for phase in dict.fromkeys([*phases_a, *phases_b]):
        graphs_a, graphs_b = phases_a.get(phase, []), phases_b.get(phase, [])
        for x, y in zip(graphs_a, graphs_b, strict=False):
            before.append(Diff(_named(x.before, names[0]), _named(y.before, names[1]), ""))
            after.append(Diff(_named(x.after, f"{names[0]}, rewritten"), _named(y.after, f"{names[1]}, rewritten"), ""))
        if len(graphs_a) != len(graphs_b):
            missing.append(f"{phase}: {len(graphs_a)} graphs in {names[0]}, {len(graphs_b)} in {names[1]}")
    return Comparison(before, after, _sites(a, b), "; ".join(missing))


def _by_phase(report: Mapping[str, Any]) -> dict[str, list[PlanGraphs]]:
    phases: dict[str, list[PlanGraphs]] = {}
    for d in report.get("graphs", []):
        graphs = PlanGraphs.from_dict(d)
        phases.setdefault(graphs.phase, []).append(graphs)
    return phases


def _named(s: Snapshot, name: str) -> Snapshot:
    """The snapshot with a label and without a lineage: equal names in two runs may be a coincidence."""
    return replace(s, label=name, lineage="")


def _sites(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[SiteChange]:
    sites_a, sites_b = _numbered(a), _numbered(b)
    changes = []
    for key in dict.fromkeys([*sites_a, *sites_b]):
        x, y = sites_a.get(key), sites_b.get(key)
        if x is None or y is None:
            strategies = [str(site["strategy"]) if site else "missing" for site in (x, y)]
            changes.append(SiteChange(key, (("site", strategies[0], strategies[1]),)))
        elif changed := tuple((f, str(x.get(f)), str(y.get(f))) for f in _COMPARED if x.get(f) != y.get(f)):
            changes.append(SiteChange(key, changed))
    return changes


def _numbered(report: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The sites by id. Sites of a second graph of the same phase are "forward.0 (2)"."""
    plans: dict[str, list[str]] = {}
    sites = {}
    for site in report["sites"]:
        known = plans.setdefault(site["phase"], [])
        plan = str(site.get("plan", ""))
        if plan not in known:
            known.append(plan)
        number = known.index(plan) + 1
        sites[site["id"] if number == 1 else f"{site['id']} ({number})"] = site
    return sites

"""Stored reports and plans read back, and two of them compared. Imports no torch: the command line starts quickly."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ub_overlap.runtime import plan_store
from ub_overlap.runtime.errors import OptionError

from .edits import Diff
from .graph_store import Graphs
from .snapshot import Snapshot

_TOLD = ("kind", "strategy", "reason", "group", "ranks", "dtype", "shapes", "module")
"""What two runs of a site are compared by."""


def read(path: str | Path) -> dict[str, Any]:
    """A report: of Report.to_json, or a stored plan (with the graphs that lie beside it). OptionError names what is wrong."""
    name = str(path)
    try:
        found = json.loads(Path(path).read_text())
    except (OSError, ValueError, UnicodeDecodeError) as e:
        raise OptionError("this is no report", where=name, got=str(e), expected="a JSON file of Report.to_json()") from e
    if not isinstance(found, dict) or not isinstance(found.get("sites"), list) or found.get("version") != 1:
        version = found.get("version") if isinstance(found, dict) else None
        raise OptionError(
            "this is no report", where=name, got=f"version {version!r}" if version else "other JSON",
            expected="what Report.to_json() writes, version 1, or a stored plan", fix="explain(...)(...).to_json()",
        )  # fmt: skip
    if "digest" in found:
        found = _of_plan(found)
    try:
        for graphs in found.get("graphs", []):
            Graphs.from_dict(graphs)
    except (ValueError, KeyError, TypeError, IndexError) as e:
        raise OptionError("a graph of this report cannot be read", where=name, got=f"{type(e).__name__}: {e}") from e
    return found


def _of_plan(plan: dict[str, Any]) -> dict[str, Any]:
    """A stored plan as a report: what ran is not known."""
    digest = str(plan["digest"])
    packed = plan_store.load_graphs(digest)
    try:
        graphs = [Graphs.unpack(packed).to_dict()] if packed else []
    except ValueError:
        graphs = []
    sites = [{**site, "plan": digest} for site in plan["sites"]]
    return {"version": 1, "plans": [digest], "sites": sites, "profile": plan.get("profile", ""), "lanes": {}, "graphs": graphs}


@dataclass(frozen=True, slots=True)
class SiteChange:
    """A site that is not the same in two runs. `fields`: (what, in the first, in the second)."""

    site: str
    fields: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two reports: their graphs as they came to the backend, as they left it, and what was decided."""

    before: list[Diff]
    after: list[Diff]
    sites: list[SiteChange]
    missing: str = ""
    """Graphs that only one of both has, in words."""

    @property
    def same(self) -> bool:
        return not self.sites and not self.missing and all(d.same for d in (*self.before, *self.after))

    @property
    def shown(self) -> list[Diff]:
        """What is worth a look: graphs that came in different; else those that left so."""
        return [d for d in self.before if not d.same] or [d for d in self.after if not d.same]

    def to_dict(self) -> dict[str, Any]:
        return {
            "same": self.same,
            "missing": self.missing,
            "sites": [{"site": s.site, **{f: [a, b] for f, a, b in s.fields}} for s in self.sites],
            "before": [d.to_dict() for d in self.before],
            "after": [d.to_dict() for d in self.after],
        }


def compare(a: Mapping[str, Any], b: Mapping[str, Any], names: tuple[str, str]) -> Comparison:
    """Graphs are paired by phase, in order."""
    here, there = _by_phase(a), _by_phase(b)
    before, after, odd = [], [], []
    for phase in dict.fromkeys([*here, *there]):
        mine, theirs = here.get(phase, []), there.get(phase, [])
        for x, y in zip(mine, theirs, strict=False):
            before.append(Diff(_named(x.before, names[0]), _named(y.before, names[1]), ""))
            after.append(Diff(_named(x.after, f"{names[0]}, rewritten"), _named(y.after, f"{names[1]}, rewritten"), ""))
        if len(mine) != len(theirs):
            odd.append(f"{phase}: {len(mine)} graphs in {names[0]}, {len(theirs)} in {names[1]}")
    return Comparison(before, after, _sites(a, b), "; ".join(odd))


def _by_phase(report: Mapping[str, Any]) -> dict[str, list[Graphs]]:
    found: dict[str, list[Graphs]] = {}
    for d in report.get("graphs", []):
        graphs = Graphs.from_dict(d)
        found.setdefault(graphs.phase, []).append(graphs)
    return found


def _named(s: Snapshot, name: str) -> Snapshot:
    """Another lineage: names of two runs may be alike by chance."""
    return replace(s, label=name, lineage="")


def _sites(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[SiteChange]:
    here, there = _numbered(a), _numbered(b)
    found = []
    for key in dict.fromkeys([*here, *there]):
        x, y = here.get(key), there.get(key)
        if x is None or y is None:
            said = [str(one["strategy"]) if one else "not there" for one in (x, y)]
            found.append(SiteChange(key, (("site", said[0], said[1]),)))
        elif changed := tuple((f, str(x.get(f)), str(y.get(f))) for f in _TOLD if x.get(f) != y.get(f)):
            found.append(SiteChange(key, changed))
    return found


def _numbered(report: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Sites by id; those of a second graph of the same phase as "forward.0 (2)"."""
    plans: dict[str, list[str]] = {}
    found = {}
    for site in report["sites"]:
        known = plans.setdefault(site["phase"], [])
        plan = str(site.get("plan", ""))
        if plan not in known:
            known.append(plan)
        number = known.index(plan) + 1
        found[site["id"] if number == 1 else f"{site['id']} ({number})"] = site
    return found

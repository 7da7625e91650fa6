"""A stored report, one of its sites, and the difference of two reports, as text for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...reports.what_next import find_exposed
from ...text.short_line import short_line
from ...text.table import render_table
from ...text.times import format_times
from ..edits import Diff
from ..snapshot import format_node
from ..stored_report import Comparison

OPTIONAL_COLUMNS = ("line", "predicted us", "module", "measured us")
"""Columns of the overview that a narrow terminal does not need, least important first."""


def render_overview(report: Mapping[str, Any], diffs: Sequence[Diff], width: int | None = None) -> str:
    """Return the sites, the reasons of those that are left alone, and the edits of every graph. `width`: of its tables."""
    sites = report["sites"]
    if not sites:
        return "no graph with collectives was compiled"
    rows = [
        {
            "site": s["id"],
            "kind": s["kind"],
            "decision": s["strategy"] if not s["reason"] else f"none: {s['reason']}",
            "module": s["module"],
            "line": short_line(s["source"]),
            "predicted us": _times(s),
            "measured us": _short(s.get("measured_us")),
        }
        for s in sites
    ]
    parts = [report.get("summary") or "", render_table(rows, width=width, optional=OPTIONAL_COLUMNS)]
    left = [
        f"  {s['id']} {s['kind']} at {s['source'] or s['module']}: {s['reason']}: {s['detail']}" for s in sites if s["reason"]
    ]
    parts += ["left alone:\n" + "\n".join(left)] if left else []
    parts += [d.table(width) for d in diffs] or ["no snapshots of the graphs were kept"]
    return "\n\n".join(filter(None, [*parts, report.get("totals"), find_exposed(sites).text()]))


def _short(value: Any) -> Any:
    return f"{value:.4g}" if isinstance(value, float) else value


def _times(site: Mapping[str, Any]) -> str:
    return format_times(site.get("predicted_us") or {}, site.get("choice") or "none")


def render_site(report: Mapping[str, Any], diffs: Sequence[Diff], site: str) -> str:
    """Return all facts about a site, in every graph that has a site of that name."""
    parts = []
    for s in report["sites"]:
        if s["id"] != site:
            continue
        decided = ("kind", "strategy", "reason", "detail", "module", "source", "group", "ranks", "dtype", "bytes", "flops")
        run = ("executed", "transport", "calls", "bytes_copied", "bytes_overlapped", "measured_us", "error")
        facts = {k: s[k] for k in (*decided, *run) if s.get(k) not in (None, "")}
        facts |= {f"shape of {k}": v for k, v in s["shapes"].items()}
        if s.get("predicted_us"):
            facts["predicted us"] = _times(s)
        text = "\n".join(f"  {k:<20} {_short(v)}" for k, v in facts.items())
        parts.append(f"{site}  (plan {s.get('plan', '')})\n{text}")
        parts += [_nodes(d, site) for d in diffs if d.plan == s.get("plan") and site in d.by_site]
    return "\n".join(parts)


def _nodes(diff: Diff, site: str) -> str:
    edit = diff.by_site[site]
    lines = [f"  {edit.title}"]
    lines += [f"  - {format_node(diff.a, diff.a.nodes[i])}" for i in edit.removed]
    lines += [f"  + {format_node(diff.b, diff.b.nodes[j])}" for j in edit.added]
    return "\n".join(lines)


def render_comparison(comparison: Comparison, width: int | None = None) -> str:
    """Return the differences of two reports. `width`: of its tables."""
    if comparison.same:
        return f"no difference: {len(comparison.before)} graphs"
    parts = [comparison.missing]
    if comparison.sites:
        rows = [{"site": c.site, "what": f, "first": a, "second": b} for c in comparison.sites for f, a, b in c.fields]
        parts.append(render_table(rows, width=width))
    for d in comparison.shown:
        parts.append(f"{d.table(width)}\nfirst node that differs:\n{d.first()}")
    return "\n\n".join(filter(None, parts))

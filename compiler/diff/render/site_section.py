"""A stored report, and the difference of two, as text for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tabulate import tabulate

from ..edits import Diff
from ..snapshot import line_number, line_of
from ..stored_report import Comparison


def overview(report: Mapping[str, Any], diffs: Sequence[Diff]) -> str:
    """Sites, what was left alone and why, and the edits of every graph."""
    sites = report["sites"]
    if not sites:
        return "no graph with collectives was compiled"
    rows = [
        {
            "site": s["id"],
            "kind": s["kind"],
            "decision": s["strategy"] if not s["reason"] else f"none: {s['reason']}",
            "module": s["module"],
            "line": line_number(s["source"]),
            "predicted us": _times(s),
            "measured us": _short(s.get("measured_us")),
        }
        for s in sites
    ]
    parts = [report.get("summary") or "", tabulate(rows, headers="keys", tablefmt="simple", disable_numparse=True)]
    left = [
        f"  {s['id']} {s['kind']} at {s['source'] or s['module']}: {s['reason']}: {s['detail']}" for s in sites if s["reason"]
    ]
    parts += ["left alone:\n" + "\n".join(left)] if left else []
    parts += [str(d) for d in diffs] or ["no snapshots of the graphs were kept"]
    return "\n\n".join(filter(None, [*parts, report.get("totals")]))


def _short(value: Any) -> Any:
    return f"{value:.4g}" if isinstance(value, float) else value


def _times(site: Mapping[str, Any]) -> str:
    times = site.get("predicted_us") or {}
    return ", ".join(f"{name} {us:.0f}" for name, us in times.items())


def one(report: Mapping[str, Any], diffs: Sequence[Diff], site: str) -> str:
    """Everything that is known of a site, in every graph that has one of that name."""
    parts = []
    for s in report["sites"]:
        if s["id"] != site:
            continue
        shown = ("kind", "strategy", "reason", "detail", "module", "source", "group", "ranks", "dtype", "bytes", "flops")
        run = ("executed", "transport", "calls", "bytes_copied", "bytes_beside_matmul", "measured_us", "error")
        facts = {k: s[k] for k in (*shown, *run) if s.get(k) not in (None, "")}
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
    lines += [f"  - {line_of(diff.a, diff.a.nodes[i])}" for i in edit.removed]
    lines += [f"  + {line_of(diff.b, diff.b.nodes[j])}" for j in edit.added]
    return "\n".join(lines)


def comparison(found: Comparison) -> str:
    """What two reports do not have in common."""
    if found.same:
        return f"no difference: {len(found.before)} graphs"
    parts = [found.missing]
    if found.sites:
        rows = [{"site": c.site, "what": f, "first": a, "second": b} for c in found.sites for f, a, b in c.fields]
        parts.append(tabulate(rows, headers="keys", tablefmt="simple", disable_numparse=True))
    for d in found.shown:
        parts.append(f"{d}\nfirst node that differs:\n{d.first()}")
    return "\n\n".join(filter(None, parts))

"""Write a self-contained HTML page: both graphs side by side, and the sites with their predictions.

page.html  the frame (a jinja2 template)      page.css  the style      page.js  the behavior, over the result of `data`
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import metadata
from itertools import zip_longest
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ...plan.outcome import OUTCOMES, outcome_of
from ...plan.step_kind import LABELS, step_kind
from ...reports.what_next import copied_bytes, find_exposed
from ...text.short_line import short_line
from ..edits import Diff
from ..graph_store import PlanGraphs
from ..pair_nodes import NONE
from ..rows import DiffRow, align_rows

FOLDER = Path(__file__).parent
KINDS = ("same", "changed", "removed", "added", "moved", "replaced")
"""The kinds of row in page.js. "replaced": a removed and an added node side by side."""


def write(path: str | Path, report: Mapping[str, Any], title: str = "ub_overlap report", figure: str = "") -> Path:
    """Write the page of a report, as Report.to_dict returns it or as its JSON is read. `figure`: HTML above the graphs."""
    return write_page(path, data(report, title), title, figure)


def write_diffs(path: str | Path, diffs: list[Diff], title: str) -> Path:
    """Write the page of any diffs: of two runs, or of two ranks."""
    return write_page(path, {**_EMPTY, "title": title, "graphs": [_graph(d, f"{d.phase} {d.plan}") for d in diffs]}, title)


def write_page(path: str | Path, content: Mapping[str, Any], title: str, figure: str = "") -> Path:
    """Write the page of the data that page.js reads, with HTML above the graphs."""
    environment = Environment(loader=FileSystemLoader(FOLDER), autoescape=True, undefined=StrictUndefined)
    # "<" could end the script. The others end a line in JavaScript, but not in JSON.
    text = json.dumps(content, separators=(",", ":")).replace("<", "\\u003c").replace("\u2028", " ").replace("\u2029", " ")
    page = environment.get_template("page.html").render(
        title=title,
        css=Markup((FOLDER / "page.css").read_text()),
        js=Markup((FOLDER / "page.js").read_text()),
        data=Markup(text),
        figure=Markup(figure),
        what_next=content["what_next"],
        docs=_documentation(),
    )
    path = Path(path)
    path.write_text(page, encoding="utf-8")
    return path


def _documentation() -> str:
    """Return the address of the folder docs/ that the installed package names, "" where it names none."""
    try:
        urls = metadata.metadata("ub_overlap").get_all("Project-URL") or []
    except metadata.PackageNotFoundError:
        return ""
    return next((url.partition(", ")[2].removesuffix("index.md") for url in urls if url.startswith("Documentation, ")), "")


_EMPTY: dict[str, Any] = {
    "summary": "", "totals": "", "profile": "", "sites": [], "lanes": {}, "graphs": [], "what_next": None, "during_matmul": {},
    "outcomes": {outcome.name: outcome.label for outcome in OUTCOMES},
    "overlapped": [outcome.name for outcome in OUTCOMES if outcome.is_overlapped], "step_kinds": LABELS,
}  # fmt: skip


def data(report: Mapping[str, Any], title: str = "") -> dict[str, Any]:
    """Return the data that page.js draws: sites and lanes of the report, and each graph with its rows and edits."""
    graphs = []
    for d in report.get("graphs", []):
        snapshots = PlanGraphs.from_dict(d)
        joint = snapshots.joint_diff()
        graphs += [_graph(joint, f"joint {snapshots.plan}")] if joint else []
        graphs.append(_graph(snapshots.diff(), f"{snapshots.phase} {snapshots.plan}"))
    kept = {k: report.get(k, _EMPTY[k]) for k in ("summary", "totals", "profile", "sites", "lanes")}
    sites = [{**site, **_shown(site)} for site in kept["sites"]]
    return {
        **_EMPTY, **kept, "sites": sites, "lanes": _lanes(kept["lanes"]), "title": title, "graphs": graphs,
        "what_next": find_exposed(sites).to_dict(), "during_matmul": _during_matmul(sites),
    }  # fmt: skip


def _shown(site: Mapping[str, Any]) -> dict[str, str]:
    return {"outcome": outcome_of(site["strategy"], site.get("reason")).name, "line": short_line(site["source"])}


def _during_matmul(sites: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return by plan the share of the copied bytes that were copied during a matmul; nothing for plans without times."""
    of_plan: dict[str, list[tuple[int | None, int | None]]] = {}
    for site in sites:
        figures = (site.get("bytes_copied"), site.get("bytes_overlapped"))
        of_plan.setdefault(site.get("plan", ""), []).append(figures)
    sums = {plan: copied_bytes(figures) for plan, figures in of_plan.items()}
    return {plan: during / copied for plan, (copied, during) in sums.items() if copied}


def _lanes(lanes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the lanes by site, with the kind of each step as its last part."""
    return {
        site: [{**lane, "steps": [[*step, step_kind(step[1])] for step in lane["steps"]]} for lane in of_site]
        for site, of_site in lanes.items()
    }


def _graph(diff: Diff, name: str) -> dict[str, Any]:
    return {
        "name": name,
        "phase": diff.phase,
        "plan": diff.plan,
        "counts": diff.counts(),
        "before": diff.a.to_dict(),
        "after": diff.b.to_dict(),
        "rows": [[r.before, r.after, KINDS.index(r.kind), r.edit] for r in side_by_side(diff)],
        "edits": [
            {
                "site": e.site,
                "title": e.title,
                "module": e.module,
                "source": e.source,
                "line": short_line(e.source),
                "removed": e.removed,
                "added": e.added,
                "changed": [[c.before, c.after, c.fields] for c in e.changed],
            }
            for e in diff.edits
        ],
    }


def side_by_side(diff: Diff) -> list[DiffRow]:
    """Return the rows, with removed and added nodes between two kept nodes on the same lines, edit by edit."""
    out: list[DiffRow] = []
    gap: list[DiffRow] = []

    def flush() -> None:
        for edit in dict.fromkeys(r.edit for r in gap):
            gone = [r for r in gap if r.edit == edit and r.after == NONE]
            came = [r for r in gap if r.edit == edit and r.before == NONE]
            for x, y in zip_longest(gone, came):
                if x and y and x.kind == "removed" and y.kind == "added":
                    out.append(DiffRow(x.before, y.after, "replaced", edit))
                else:
                    out.extend(r for r in (x, y) if r)
        gap.clear()

    for row in align_rows(diff):
        if row.before != NONE and row.after != NONE:
            flush()
            out.append(row)
        else:
            gap.append(row)
    flush()
    return out

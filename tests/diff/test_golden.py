"""Tests of every renderer's output against the files in golden/.

ACCEPT=1 pytest tests/diff/test_golden.py updates them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.diff.samples import after, before, graphs, renamed, report, with_clone
from ub_overlap.compiler.diff import stored_report
from ub_overlap.compiler.diff.edits import Diff
from ub_overlap.compiler.diff.render import dot, html, model_explorer, site_section, text

GOLDEN = Path(__file__).parent / "golden"


def rewrite() -> Diff:
    return graphs().diff()


def other_run() -> Diff:
    return Diff(before(), renamed(with_clone(before(rows=32)), "another run"))


def comparison() -> str:
    a, b = report(), report()
    b["sites"] = [{**b["sites"][0], "strategy": "none", "reason": "no_gain"}, *b["sites"][1:2]]
    b["graphs"] = [{**graphs().to_dict(), "before": renamed(with_clone(before())).to_dict()}]
    return site_section.render_comparison(stored_report.compare_reports(a, b, ("a.json", "b.json")))


def pretty(value: object) -> str:
    """Return indented JSON with each short list on one line."""
    return re.sub(r"\[\s+([^\[\]{}]*?)\s+\]", lambda m: f"[{' '.join(m[1].split())}]", json.dumps(value, indent=1))


WRITTEN: dict[str, Callable[[], str]] = {
    "table.txt": lambda: str(rewrite()),
    "table_of_runs.txt": lambda: str(other_run()),
    "unified.txt": lambda: text.unified(rewrite()),
    "unified_of_runs.txt": lambda: text.unified(other_run(), context=1),
    "overview.txt": lambda: site_section.render_overview(report(), [rewrite()]),
    "site.txt": lambda: site_section.render_site(report(), [rewrite()], "forward.1"),
    "comparison.txt": comparison,
    "diff.json": lambda: pretty(rewrite().to_dict()),
    "rewrite.dot": lambda: dot.dot(rewrite()),
    "model_explorer.json": lambda: pretty(model_explorer.collection([rewrite()])),
    "page_data.json": lambda: pretty(html.data(report(), "golden")),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_golden(name: str) -> None:
    path, found = GOLDEN / name, WRITTEN[name]().rstrip() + "\n"
    if os.environ.get("ACCEPT"):
        path.write_text(found)
    assert found == path.read_text(), f"{name} differs; if that is right: ACCEPT=1 python -m pytest {__file__}"


def test_colour_is_optional() -> None:
    assert "\x1b[31m-mm" in text.unified(rewrite(), color=True) and "\x1b" not in text.unified(rewrite())


def test_the_page_is_one_file(tmp_path: Path) -> None:
    """The page fetches nothing, and no graph text can close the script element around it."""
    hostile = report()
    hostile["sites"][0]["detail"] = "</script><script>alert(1)</script>\u2028"
    page = html.write(tmp_path / "page.html", hostile).read_text()
    assert not re.search(r"""(src|href)\s*=\s*["'](?!data:|#)|https?://(?!www\.w3\.org/2000/svg)|@import|url\(""", page)
    assert page.count("</script>") == 2 and "alert(1)" in page
    embedded = page.partition('id="data">')[2].partition("</script>")[0]
    assert json.loads(embedded)["sites"][0]["detail"].startswith("</script>")


def test_dot_is_balanced_and_complete() -> None:
    """Every node named by an edge is drawn."""
    said = dot.dot(rewrite())
    drawn = set(re.findall(r"^\s+([ab]\d+) \[", said, re.M))
    used = {n for pair in re.findall(r"^\s+([ab]\d+) -> ([ab]\d+)", said, re.M) for n in pair}
    assert used <= drawn and said.count("{") == said.count("}")
    assert "forward.1" not in dot.dot(rewrite(), "forward.0").split("subgraph", 1)[1].split("label=")[1].split(";")[0]


def test_model_explorer_edges_lead_somewhere() -> None:
    for graph in model_explorer.collection([Diff(before(), after())])["graphs"]:
        known = {n["id"] for n in graph["nodes"]}
        assert all(e["sourceNodeId"] in known for n in graph["nodes"] for e in n["incomingEdges"])

"""Tests of `_repr_html_`: every cell is there, nothing is executed or fetched, and the style stays inside of the fragment."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.diff.devtools import BROWSER, Page
from tests.diff.samples import graphs
from ub_overlap.compiler.cost.profile_lookup import load
from ub_overlap.compiler.diff.render.notebook import MAX_ROWS, Section, render_notebook
from ub_overlap.compiler.diff.render.site_section import render_overview
from ub_overlap.compiler.plan.decision import Decision, SiteSizes
from ub_overlap.compiler.plan.plan import Plan
from ub_overlap.compiler.plan.reasons import Kind, Reason
from ub_overlap.compiler.plan.strategy import NONE, Mode, Strategy
from ub_overlap.compiler.reports.report import Report
from ub_overlap.tools.planner.planned_step import PlannedStep, PlanRow
from ub_overlap.tools.planner.sizes import MODELS

VOID = {"br", "meta", "link"}


class Cells(HTMLParser):
    """Cells by row, and the tags that are not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.open.append(tag)
        self.tags.add(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def some_report() -> Report:
    common = {"kind": Kind.ALL_GATHER_MATMUL, "phase": "forward", "group": "g0", "ranks": 2, "module": "layers.0.<b>wq</b>"}
    decisions = (
        Decision(id="forward.0", strategy=Strategy(Mode.PIPELINED, 4), **common),
        Decision(id="forward.1", strategy=NONE, reason=Reason.NO_MATMUL, detail="</style><script>alert(1)</script>", **common),
    )
    return Report([Plan("forward", decisions)])


def test_a_report() -> None:
    text = some_report()._repr_html_()
    parsed = Cells(text)
    assert parsed.open == [] and not parsed.tags & {"script", "link", "img", "b", "iframe"}
    heads, first, second = parsed.rows[:3]
    assert dict(zip(heads, first, strict=True))["strategy"] == "pipelined:chunks=4"
    assert dict(zip(heads, first, strict=True))["module"] == "layers.0.<b>wq</b>"
    assert "no_matmul" in second and parsed.rows[4][:3] == ["forward.1", "all_gather_matmul", "no_matmul"]
    assert "1 of 2 collectives overlapped" in text and "http" not in text and "\x1b" not in text


def test_a_report_in_80_columns() -> None:
    """Modules and predictions stay, in a report and in `explain`; columns without values go first."""
    work = SiteSizes("all_gather_matmul", 2, "float32", ((1024, 384, 256, False), (1024, 384, 256, False)), 1024, 256)
    site = Decision(
        id="forward.10", kind=Kind.ALL_GATHER_MATMUL, phase="forward", strategy=Strategy(Mode.PIPELINED), group="g0", ranks=2,
        module="layers.10.feed_forward.w1", source="/home/someone/model.py:82: return x", bytes=524288, work=work,
        shapes=(("matmul0", "[1024, 256] @ [256, 384]"),),
    )  # fmt: skip
    report = Report([Plan("forward", (site,))])
    outlook = report.decisions[0].outlook
    assert outlook is not None
    for text in (report.table(80), render_overview(report.to_dict(), [], 80)):
        table = text[text.index("site ") :].partition("\n\n")[0]
        lines = table.partition("not shown")[0].splitlines()
        shown = " ".join(lines)
        assert max(map(len, table.splitlines())) <= 80
        assert "module" in lines[0] and "predicted" in lines[0] and "layers.10" in shown and "w1" in shown
        assert f"{outlook.none.us:.0f} -> {outlook.chosen.us:.0f}" in shown
        assert ("calls" if "strategy" in lines[0] else "measured us") in table.partition("without values: ")[2]


def test_every_selector_is_scoped() -> None:
    css = re.search(r"<style>(.*?)</style>", some_report()._repr_html_(), re.DOTALL)
    assert css is not None
    selectors = [s.strip() for block in re.findall(r"([^{}]+)\{[^{}]*\}", css[1]) for s in block.split(",")]
    assert len(selectors) > 8 and all(s.startswith(".ub-overlap-report") for s in selectors)
    assert "@import" not in css[1] and "url(" not in css[1]


def test_other_objects() -> None:
    diff = graphs().diff()
    assert "all_gather + wait + 2 matmuls -&gt; all_gather_matmul" in diff._repr_html_()
    assert "no graph with collectives was compiled" in Report([])._repr_html_() and Cells(Report([])._repr_html_()).rows == []
    (site, _) = some_report().plans[0].decisions
    step = PlannedStep(MODELS["llama-8b"], load("cpu"), (PlanRow(site, None),), (), {"matmuls": 5.0})
    assert "forward.0" in Cells(step._repr_html_()).rows[1] and "other work: matmuls 5 us" in step._repr_html_()
    assert "forward.0" in str(step) and "other work: matmuls 5 us" in str(step) and "M N K" in str(step)
    narrow = step.text(60)
    assert "without values: M N K, MB, matmul, comm, gain" in narrow and "not shown" not in narrow
    assert max(len(line) for line in narrow.splitlines() if line.startswith(("site", "---", "forward."))) <= 60


def test_many_rows_are_cut() -> None:
    text = render_notebook([Section("sites", [{"site": n, "gain us": 1.25} for n in range(MAX_ROWS + 7)], floats=".1f")])
    assert len(Cells(text).rows) == MAX_ROWS + 1 and "and 7 more rows" in text and 'class="number">1.2<' in text


@pytest.mark.skipif(BROWSER is None, reason="no chromium or google-chrome on PATH")
def test_in_a_notebook_page(tmp_path: Path) -> None:
    """Two outputs in one page: the page's own table keeps its style, and the folds open by keyboard."""
    page = tmp_path / "notebook.html"
    fragment = some_report()._repr_html_()
    own = "<!doctype html><title>n</title><table id=own><tr><td>x</td></tr></table>"
    page.write_text(own + fragment + fragment, encoding="utf-8")
    with Page(page, tmp_path / "profile") as browser:
        style = "getComputedStyle(document.querySelector('{}')).{}"
        assert browser.evaluate(style.format("#own td", "borderBottomStyle")) == "none"
        assert browser.evaluate(style.format(".ub-overlap-report td", "borderBottomStyle")) == "solid"
        browser.press("Tab", "Tab", "Enter")
        assert browser.evaluate("document.querySelectorAll('details')[1].open") is True

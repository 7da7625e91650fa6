"""Tests of the HTML page in headless Chromium, without a driver.

The test adds a script that clicks and types, then reads the resulting DOM (chromium --headless --dump-dom). The DOM also
holds the page's JavaScript errors.
"""

from __future__ import annotations

import json
import re
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from benchmarks.graph_diff import graph
from tests.diff.devtools import BROWSER
from tests.diff.samples import report
from tests.harness.ranks import PATIENCE_S
from ub_overlap.compiler.diff.graph_store import PlanGraphs
from ub_overlap.compiler.diff.render import html

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium or google-chrome on PATH")

ERRORS = """<script>
window.problems = [];
addEventListener("error", (e) => problems.push(String(e.message)));
addEventListener("unhandledrejection", (e) => problems.push(String(e.reason)));
for (const name of ["error", "warn"]) console[name] = (...said) => problems.push(said.join(" "));
</script>"""
STEPS = """<script>
const $ = (s) => document.querySelector(s), all = (s) => [...document.querySelectorAll(s)];
const key = (k) => dispatchEvent(new KeyboardEvent("keydown", { key: k, bubbles: true }));
const later = (ms) => new Promise((done) => setTimeout(done, ms));
const texts = (s) => all(s).map((e) => e.textContent);
const type = async (s) => { $("#search").value = s; $("#search").dispatchEvent(new Event("input")); await later(300); };
(async () => {
  const out = {};
  try { STEPS_HERE } catch (e) { problems.push("test: " + e); }
  out.problems = problems;
  const box = document.createElement("pre");
  box.id = "outcome"; box.textContent = JSON.stringify(out);
  document.body.append(box);
})();
</script>"""


def browse(folder: Path, found: dict[str, Any], steps: str) -> dict[str, Any]:
    """Return `out` after the steps (JavaScript) have run on the page of a report."""
    path = html.write(folder / "page.html", found)
    page = (
        path.read_text()
        .replace("<head>", f"<head>{ERRORS}", 1)
        .replace("</body>", STEPS.replace("STEPS_HERE", steps) + "</body>")
    )
    path.write_text(page)
    command = [
        str(BROWSER), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1600,900",
        f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=8000", "--dump-dom", path.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    outcome = re.search(r'<pre id="outcome">(.*?)</pre>', done.stdout, re.S)
    assert outcome, done.stdout[-2000:] + done.stderr[-2000:]
    result: dict[str, Any] = json.loads(unescape(outcome[1]))
    assert result["problems"] == []
    return result


def test_sites_details_filters_and_search(tmp_path: Path) -> None:
    out = browse(
        tmp_path,
        report(),
        """
        out.sites = texts("#sites .id"); out.filters = texts("#filters button"); out.summary = $("#summary").textContent;
        out.rows = all(".row").length;
        key("j"); out.first = $("#detail").textContent; out.lanes = all("svg.lanes rect[fill]").length;
        out.current = texts("#sites [aria-current=true] .id"); out.marked = all(".row.site").length;
        out.gone = all("#detail li.gone").length; out.came = all("#detail li.came").length;
        key("j"); key("j"); out.third = $("#detail").textContent;
        key("Escape"); out.shut = $("#detail").hidden;
        $("[data-filter=missed]").click(); out.missed = texts("#sites .id"); $("[data-filter=all]").click();
        await type("reduce_scatter"); out.found = texts(".row .name"); key("Escape"); out.cleared = all(".row").length;
        key("d"); out.only = all(".row").length;
        all(".row .cell.full")[0].click(); out.node = $("#detail h2 code").textContent;
        const root = document.documentElement.dataset, theme = root.theme; key("t"); out.turned = root.theme !== theme;
        key("?"); out.help = $("#help").open;
        """,
    )
    assert out["sites"] == ["forward.0", "forward.1", "forward.2"]
    assert out["filters"] == ["all 3", "pipelined 2", "missed 1"]
    assert "2 of 3 collectives overlapped" in out["summary"]
    assert "all_gather + wait + 2 matmuls -> all_gather_matmul" in out["first"] and "model.py:12" in out["first"]
    assert "[128, 32] @ [32, 48]" in out["first"] and "12.5 us" in out["first"]
    assert (out["lanes"], out["gone"], out["came"], out["current"]) == (6, 4, 4, ["forward.0"])
    assert out["marked"] >= 4 and out["shut"] and out["turned"] and out["help"]
    assert "relu stands between <b>matmul</b>" in out["third"] and out["missed"] == ["forward.2"]
    assert out["found"] == ["mm_2", "fused_1", "scatter", "out_2"]
    assert out["cleared"] == out["rows"] > out["only"] > 0
    assert out["node"] in ("gather", "fused", "wait")


def test_inputs_are_folded_and_links_open_sites(tmp_path: Path) -> None:
    out = browse(
        tmp_path,
        report(),
        """
        const inputs = () => texts(".row .name").filter((name) => ["x", "w1", "w2", "w3"].includes(name)).length;
        out.folded = inputs(); key("i"); out.shown = inputs(); key("i"); out.again = inputs();
        out.next = texts("#next p a"); $("#next p a").click(); await later(100); out.opened = $("#detail h2 code").textContent;
        location.hash = "#site-forward.1"; await later(100); out.second = $("#detail h2 code").textContent;
        """,
    )
    assert (out["folded"], out["shown"], out["again"]) == (0, 8, 0)
    assert out["next"] == [out["opened"], "forward.0"] == ["forward.2", "forward.0"] and out["second"] == "forward.1"


def test_twenty_thousand_nodes(tmp_path: Path) -> None:
    """The document holds only the visible nodes at every scroll position."""
    plan = "f" * 16
    found = {**report(), "plans": [plan], "sites": [], "graphs": [
        PlanGraphs(plan, "forward", graph(20_000, False, "one", "before"), graph(20_000, True, "one", "after")).to_dict()
    ]}  # fmt: skip
    out = browse(
        tmp_path,
        found,
        """
        out.rows = all(".row").length; out.status = $("#status").textContent;
        const list = $("#list"); list.scrollTop = list.scrollHeight; list.dispatchEvent(new Event("scroll")); await later(100);
        out.last = texts(".row .name").at(-1); out.end = all(".row").length;
        await type("layers.777.mlp matmul_reduce"); out.found = all(".row").length;
        """,
    )
    assert 10 < out["rows"] < 120 and 10 < out["end"] < 120 and out["last"] == "output"
    assert "rows" in out["status"] and out["found"] >= 1

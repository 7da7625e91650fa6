"""Tests of what a report says to try next: which collectives, in which order, and that what it says to paste is valid."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

import ub_overlap
from tests.compiler.rank_compile import FORCE, build
from tests.diff.samples import PLAN, report
from tests.harness.fake_ranks import FakeRanks
from tests.models.compare import uncached
from ub_overlap.compiler.diff import stored_report
from ub_overlap.compiler.diff.render import html
from ub_overlap.compiler.diff.render.site_section import render_overview
from ub_overlap.compiler.options import Options
from ub_overlap.compiler.plan.decision import Decision
from ub_overlap.compiler.plan.plan import Plan
from ub_overlap.compiler.plan.reasons import Kind, Reason
from ub_overlap.compiler.plan.records import ReportRecord, as_record
from ub_overlap.compiler.plan.strategy import Mode, Strategy
from ub_overlap.compiler.reports.report import Report
from ub_overlap.compiler.reports.what_next import NO_TIMES, copied_bytes, exposed_us, find_exposed

SITES = report()["sites"]
LEGAL = ["pipelined", "bulk", "split"]


def left_alone(reason: str, **more: Any) -> dict[str, Any]:
    return {**SITES[2], "reason": reason, "options": LEGAL, **more}


def page_of(tmp_path: Path, found: dict[str, Any]) -> str:
    return html.write(tmp_path / "page.html", found).read_text()


def test_sorted_by_exposed_time() -> None:
    found = find_exposed(SITES)
    assert [(group.sites, group.us) for group in found.groups] == [
        ((f"{PLAN}/forward.2",), 6.0), ((f"{PLAN}/forward.0",), 3.5), ((f"{PLAN}/forward.1",), 3.5)
    ]  # fmt: skip
    assert found.headline == "13 us of communication are exposed, by 3 of 3 collectives"
    assert found.groups[0].page == "reference/reasons.md#non_linear" and found.groups[1].page == "explanation/cost_model.md"


def test_layers_are_one_group() -> None:
    modules = [f"layers.{i}.mlp.w2" for i in range(4)]
    sites = [left_alone("no_matmul", id=f"forward.{i}", module=m) for i, m in enumerate(modules)]
    (group,) = find_exposed(sites).groups
    assert group.module == "layers.*.mlp.w2" and len(group.sites) == 4 and group.us == 24.0
    assert find_exposed(sites[:1]).groups[0].module == "layers.0.mlp.w2"
    assert "forward.0 and 3 more: all_reduce no_matmul, 24 us exposed (predicted): " in str(group)


@pytest.mark.parametrize("reason", Reason)
def test_what_to_paste_is_valid(reason: Reason) -> None:
    """Also of a collective without a module, whose rule has none, and of a whole step, whose phase no rule has."""
    for more in ({}, {"module": ""}, {"phase": "step"}, {"predicted_us": {"none": 6.0, "pipelined:chunks=4": 5.0}}):
        (group,) = find_exposed([left_alone(reason.value, **more)]).groups
        name, _, value = group.paste.partition("=")
        if name == "options":
            Options(**ast.literal_eval(value))
        else:
            assert group.paste == ("python -m ub_overlap doctor" if reason is Reason.NO_TRANSPORT else "")
    assert f'id="{reason.value}"' in Path("docs/reference/reasons.md").read_text()


def test_overlapped_sites() -> None:
    slower = {**SITES[0], "predicted_us": {"none": 30.0, "pipelined": 20.0, "bulk": 14.0}, "best": "bulk"}
    window = {**SITES[0], "window": {"exposed_us": 5.0}, "measured_us": 900.0}
    measured = {**SITES[0], "measured_us": 40.0}
    groups = [find_exposed([site]).groups[0] for site in (slower, SITES[0], window, measured)]
    assert [g.advice.split(":")[0] for g in groups[:3]] == [
        "bulk is predicted to be faster", "the fastest strategy that is predicted", "its window has too little compute"
    ]  # fmt: skip
    assert groups[0].paste.endswith("'strategy': 'auto'}]}") and groups[1].paste == "options={'autotune': True}"
    assert [(g.us, g.is_measured) for g in groups[2:]] == [(3.5, False), (31.0, True)]


def test_nothing_is_left(tmp_path: Path) -> None:
    hidden = {**SITES[0], "predicted_us": {"none": 20.0, "pipelined": 9.5}}
    merged = {**SITES[0], "strategy": "merged"}
    assert (exposed_us(hidden), exposed_us(merged)) == (0.5, None)
    found = find_exposed([hidden, merged])
    line = "nothing is left: no collective exposes more than 3 us"
    assert found.headline == line and found.text() == f"what next: {line}" and find_exposed([]).headline == ""
    assert line in page_of(tmp_path, {**report(), "sites": [hidden]})
    unknown = {**hidden, "matmul_us": None}
    assert find_exposed([hidden, unknown]).headline == f"{line}; 1 have no predicted time"


def test_a_stored_plan_has_no_schedule(tmp_path: Path) -> None:
    """The page and the text say so, and how to get one. A report of collectives without a prediction is no plan."""
    plan = Plan("forward", (Decision(id="forward.0", kind=Kind.ALL_REDUCE, phase="forward", strategy=Strategy(Mode.BULK)),))
    (tmp_path / "plan.json").write_text(plan.to_json())
    stored = stored_report.read_report(tmp_path / "plan.json")
    for shown in (page_of(tmp_path, stored), render_overview(stored, [])):
        assert NO_TIMES in shown and "nothing is left" not in shown
    assert "schedules" in NO_TIMES and "ub_overlap.reports()" in NO_TIMES
    of_program = page_of(tmp_path, Report([plan]).to_dict())
    assert NO_TIMES not in of_program and "1 have no predicted time" in of_program


def test_text_page_and_json_say_the_same(tmp_path: Path) -> None:
    sites = [left_alone("no_matmul", id=f"forward.{i}", module=f"m{i}", plan=PLAN) for i in range(5)]
    found = {**report(), "sites": sites}
    text, page = render_overview(found, []), page_of(tmp_path, found)
    section = page.partition('id="next"')[2].partition("</section>")[0]
    groups = html.data(found)["what_next"]["groups"]
    for number, group in enumerate(groups):
        assert (group["advice"] in text) and f'href="#site-{group["sites"][0]}"' in section
        assert (f"'module': 'm{number}'" in text) == (number < 3)
    assert "and 2 more, in to_html() and to_json()" in text and "<summary>2 more</summary>" in section
    assert section.count("<code>") == 5 and section.count("<details>") == section.count("</details>") == 1
    as_record({**found, "what_next": find_exposed(sites).to_dict()}, ReportRecord, "report.json", "a report")


def test_reasons_are_links_where_the_docs_have_an_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "<i>non_linear</i> (docs/reference/reasons.md#non_linear):" in page_of(tmp_path, report())
    urls = {"Project-URL": ["Issues, https://a.b/issues", "Documentation, https://a.b/blob/main/docs/index.md"]}

    class Known:
        get_all = staticmethod(urls.get)

    monkeypatch.setattr(html.metadata, "metadata", lambda _: Known())
    assert 'href="https://a.b/blob/main/docs/reference/reasons.md#non_linear">non_linear</a>' in page_of(tmp_path, report())


def test_bytes_copied_during_a_matmul() -> None:
    assert copied_bytes([(1000, 670), (50, None), (None, None), (0, 0)]) == (1000, 670)
    timed = {**SITES[0], "bytes_copied": 1000, "bytes_overlapped": 670}
    assert html.data({**report(), "sites": [timed, *SITES[1:]]})["during_matmul"] == {PLAN: 0.67}


def test_narrow_screens() -> None:
    """The tabs have a line of their own, and sites and graphs are one above the other."""
    narrow = re.search(r"@media \(max-width: 700px\) \{(.*)\n\}", (html.FOLDER / "page.css").read_text(), re.S)
    assert narrow and "#tabs { order: 1; flex: 1 0 100%; }" in narrow[1]
    assert "main, main.open { grid-template-columns: minmax(0, 1fr);" in narrow[1]


def named_inputs(rank: int, world: int) -> dict[str, list[str]]:
    case = build(rank, world, "tests.models.megatron", {"gated": True, "dims": 2, "local": 12})
    with uncached():
        graphs = ub_overlap.explain(case.module, FORCE)(*case.inputs).graphs
    return {g.phase: [n.args for n in g.before.nodes if n.op == "placeholder"] for g in graphs}


@pytest.mark.tier("test")
def test_parameters_have_their_names(fake2: FakeRanks) -> None:
    """Tangents and saved activations have none, and are shown by the names of their nodes."""
    weights = ["w1.weight", "w3.weight", "w2.weight"]
    found = fake2.run(named_inputs)[0]
    assert found["forward"] == ["x", *weights]
    assert found["backward"][:3] == weights and set(found["backward"][3:]) == {""}

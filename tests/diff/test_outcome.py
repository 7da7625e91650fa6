"""Every mode of a strategy has its own outcome, label and color in all that shows it."""

from __future__ import annotations

import logging
import re

import pytest

from tests.diff.samples import report
from ub_overlap.compiler.diff.render import html
from ub_overlap.compiler.diff.render.notebook import Section, render_notebook
from ub_overlap.compiler.plan.decision import Decision
from ub_overlap.compiler.plan.outcome import ALONE, BY_CHOICE, BY_MODE, MISSED, OUTCOMES, outcome_of
from ub_overlap.compiler.plan.plan import Plan
from ub_overlap.compiler.plan.reasons import Kind, Reason
from ub_overlap.compiler.plan.step_kind import COLORS
from ub_overlap.compiler.plan.strategy import Mode, Strategy
from ub_overlap.compiler.reports import summary
from ub_overlap.compiler.reports.outlook import Totals
from ub_overlap.compiler.reports.report import Report
from ub_overlap.compiler.reports.summary import format_plan
from ub_overlap.compiler.text.short_line import short_line
from ub_overlap.runtime.stats import SiteStats

CSS = {name: (html.FOLDER / name).read_text() for name in ("page.css", "fragment.css")}


def test_every_outcome_has_a_color() -> None:
    for outcome in OUTCOMES:
        assert f"td.{outcome.name} {{" in CSS["fragment.css"] and f"--{outcome.name}:" in CSS["page.css"]


def test_modes_differ() -> None:
    names = [outcome.name for outcome in BY_MODE.values()]
    assert len(set(names)) == len(Mode) and len({outcome.label for outcome in OUTCOMES}) == len(OUTCOMES)


@pytest.mark.parametrize("mode", Mode)
def test_a_mode_everywhere(mode: Mode) -> None:
    site = {**report()["sites"][0], "strategy": str(Strategy(mode))}
    shown = html.data({**report(), "sites": [site]})
    name = shown["sites"][0]["outcome"]
    assert name == (ALONE.name if mode is Mode.NONE else mode.value) and shown["outcomes"][name]
    assert CSS["page.css"].count(f"--{name}:") == 2, "one color by day, one by night"
    assert f"td.{name} {{" in CSS["fragment.css"]
    assert f'class="{name}"' in render_notebook([Section("sites", [{"strategy": str(Strategy(mode))}])])


@pytest.mark.parametrize(
    ("strategy", "reason", "expected"),
    [
        ("1024=none;*=pipelined:chunks=4|direct", None, "pipelined"),
        ("direct|pipelined", None, "direct"),
        ("split:chunks=4", None, "split"),
        ("none", "no_gain", "alone"),
        ("none", "non_linear", "missed"),
    ],
)
def test_tables_and_reasons(strategy: str, reason: str | None, expected: str) -> None:
    assert outcome_of(strategy, reason).name == expected


def test_reasons_that_no_user_asks_about_are_calm() -> None:
    for reason in Reason:
        assert outcome_of("none", reason.value) is (ALONE if reason in BY_CHOICE else MISSED)


def test_steps_have_the_colors_of_their_kinds() -> None:
    """Computed in Python, as the page draws them."""
    steps = [step for lanes in html.data(report())["lanes"].values() for lane in lanes for step in lane["steps"]]
    assert {tuple(step[1::3]) for step in steps} == {
        ("all_gather", "collective"), ("matmul 0", "matmul"), ("matmul 1", "matmul"), ("copy shard 0", "copy"),
        ("wait", "other_step"),
    }  # fmt: skip
    assert all(CSS["page.css"].count(f"--{kind}:") == 2 for kind in COLORS)


def test_the_page_knows_no_names_of_modes() -> None:
    """A list by hand would not follow the enum. Neither do kinds of steps."""
    page = (html.FOLDER / "page.js").read_text()
    assert [mode.value for mode in Mode if mode is not Mode.NONE and f'"{mode.value}"' in page] == []
    assert [kind for kind in COLORS if re.search(rf"\b{kind}: ", page)] == []
    shown = html.data(report())["step_kinds"]
    assert list(shown) == list(COLORS) and len(set(shown.values())) == len(COLORS)


def test_every_collective_is_in_one_count() -> None:
    """Also one that is merged and has a reason, and one that has none."""
    common = {"phase": "backward", "group": "g0", "ranks": 2, "kind": Kind.ALL_REDUCE}
    forms = [(Mode.MERGED, None)] * 5 + [(Mode.MERGED, Reason.SCALES), (Mode.BULK, None), (Mode.NONE, None)]
    forms += [(Mode.NONE, Reason.NO_MATMUL)] * 3
    decisions = [
        Decision(id=f"backward.{i}", strategy=Strategy(mode), reason=reason, **common) for i, (mode, reason) in enumerate(forms)
    ]
    counts = "1 of 11 collectives overlapped (all_reduce bulk 1); merged into others: 6; left alone: no reason 1, no_matmul 3"
    assert format_plan(Plan("backward", tuple(decisions))).endswith(counts)


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("/home/a/model.py:12: y = x / 2", "model.py:12"),
        ("/data/x: y/train.py:12: d = {a: b}", "train.py:12"),
        ("/data/v1:2/train.py:12: code", "train.py:12"),
        ("model.py:7: y = x[1:2: 3]", "model.py:7"),
        ("C:\\models\\net.py:3: return f(a)", "net.py:3"),
        ("/a/model.py:12: ", "model.py:12"),
        ("/a/model.py:12:", "model.py:12"),
        ("<string>:1: f(x)", "<string>:1"),
        ("no line", "no line"),
        ("", ""),
    ],
)
def test_short_lines(source: str, line: str) -> None:
    """Folders and code may have a colon, or a slash."""
    assert short_line(source) == line


def test_predictions_and_measurements_have_names(monkeypatch: pytest.MonkeyPatch) -> None:
    decision = Decision(
        id="forward.0", kind=Kind.ALL_REDUCE, phase="forward", group="g0", ranks=2, strategy=Strategy(Mode.BULK)
    )
    plan = Plan("forward", (decision,))
    assert "measured" not in Report([plan]).totals()
    stats = SiteStats(1, "bulk", "shared memory", bytes_copied=1000, bytes_overlapped=670, strategies={"bulk": 1})
    monkeypatch.setattr("ub_overlap.compiler.reports.report.site_stats", lambda: {f"{plan.digest}/forward.0": stats})
    assert Report([plan]).totals().endswith("; measured: 67% of 1000 bytes copied during a matmul")
    totals = str(Totals(sites=1, unknown=0, matmul_us=10, communication_us=10, none_us=20, chosen_us=15))
    assert totals.endswith("15 us as decided: predicted to hide 50% of 10 us exposed communication")


def test_the_first_plan_is_logged_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """On rank 0, at the default level; not for graphs without collectives, and not where overlap is off."""
    monkeypatch.setattr(summary._FirstPlan, "is_logged", False)
    common = {"phase": "forward", "group": "g0", "ranks": 2, "kind": Kind.ALL_REDUCE, "strategy": Strategy(Mode.NONE)}
    plan = Plan("forward", tuple(Decision(id=f"forward.{i}", reason=Reason.NO_MATMUL, **common) for i in range(17)))
    with caplog.at_level(logging.WARNING, "ub_overlap"):
        summary.log_first_plan(Plan("forward", ()), "auto")
        summary.log_first_plan(plan, "off")
        with monkeypatch.context() as other_rank:
            other_rank.setattr(summary.compat, "is_first_rank", lambda: False)
            summary.log_first_plan(plan, "auto")
        assert not caplog.messages
        summary.log_first_plan(plan, "auto")
        summary.log_first_plan(plan, "auto")
    (message,) = caplog.messages
    assert (
        "(forward): 0 of 17 collectives overlapped; left alone: no_matmul 17" in message and "ub_overlap.reports()" in message
    )

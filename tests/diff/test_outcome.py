"""Every mode of a strategy has its own outcome, label and color in all that shows it."""

from __future__ import annotations

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
from ub_overlap.compiler.reports.report import Report
from ub_overlap.compiler.reports.summary import format_plan

CSS = {name: (html.FOLDER / name).read_text() for name in ("page.css", "fragment.css")}


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
    """A list by hand would not follow the enum."""
    page = (html.FOLDER / "page.js").read_text()
    assert [mode.value for mode in Mode if mode is not Mode.NONE and f'"{mode.value}"' in page] == []


def test_merged_collectives_are_counted() -> None:
    common = {"phase": "backward", "group": "g0", "ranks": 2}
    decisions = [
        Decision(id=f"backward.{i}", kind=Kind.ALL_REDUCE, strategy=Strategy(Mode.MERGED if i < 6 else Mode.NONE), **common)
        for i in range(11)
    ]
    assert format_plan(Plan("backward", tuple(decisions))).endswith("0 of 11 collectives overlapped; merged into others: 6")


def test_a_line_of_code_with_a_slash() -> None:
    decision = Decision(
        id="forward.0", kind=Kind.ALL_REDUCE, phase="forward", group="g0", ranks=2, strategy=Strategy(Mode.NONE),
        source="/home/a/model.py:12: y = x / 2",
    )  # fmt: skip
    assert Report([Plan("forward", (decision,))]).rows()[0]["line"] == "model.py:12"

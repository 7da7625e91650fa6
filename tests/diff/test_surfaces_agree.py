"""Text, table, JSON, page and notebook say the same of random reports."""

from __future__ import annotations

import json
import random
import re
from collections import Counter

import pytest

from ub_overlap.compiler.diff.render import html
from ub_overlap.compiler.plan.decision import Decision
from ub_overlap.compiler.plan.outcome import outcome_of
from ub_overlap.compiler.plan.plan import Plan
from ub_overlap.compiler.plan.reasons import Kind, Reason
from ub_overlap.compiler.plan.strategy import Mode, Strategy
from ub_overlap.compiler.reports.report import Report

PATHS = {"/home/a/model.py": "model.py", "/data/x: y/train.py": "train.py", "relative/a.py": "a.py", "C:\\b\\net.py": "net.py"}
"""Files, and their names in tables."""
CODES = ("y = x / 2", "h = self.w1(x)  # : a/b", "return f(a, b)", "")
COUNTS = re.compile(
    r"(\d+) of (\d+) collectives overlapped(?: \([^)]*\))?(?:; merged into others: (\d+))?(?:; left alone: ([^;]*))?"
)


def random_source(draw: random.Random) -> str:
    """Return a line of code; "" where it is not known."""
    known = draw.random() < 0.8
    return f"{draw.choice([*PATHS])}:{draw.randint(1, 999)}: {draw.choice(CODES)}" if known else ""


def line_of(source: str) -> str:
    """Return what tables say of a line."""
    return next((f"{name}:{source[len(path) + 1 :].split(':')[0]}" for path, name in PATHS.items() if path in source), "")


def random_plan(draw: random.Random, phase: str) -> Plan:
    """Return a plan of up to 12 decisions, with every mode of the enum sooner or later."""
    decisions = []
    for i in range(draw.randint(1, 12)):
        mode = draw.choice([*Mode, Mode.NONE])
        decisions.append(
            Decision(
                id=f"{phase}.{i}",
                kind=draw.choice([*Kind]),
                phase=phase,
                group="g0",
                ranks=2,
                strategy=Strategy(mode),
                reason=draw.choice([*Reason]) if mode is Mode.NONE else None,
                source=random_source(draw),
                module=draw.choice(["", "layers.0.wq"]),
                detail=draw.choice(["", "relu stands between; <b>&"]),
            )
        )
    return Plan(phase, tuple(decisions))


@pytest.mark.parametrize("seed", range(60))
def test_counts_lines_and_reasons(seed: int) -> None:
    draw = random.Random(seed)
    plans = [random_plan(draw, phase) for phase in ("forward", "backward")[: draw.randint(1, 2)]]
    report = Report(plans)
    decisions = [d for plan in plans for d in plan.decisions]

    stored = json.loads(report.to_json())
    assert [(s["id"], s["strategy"], s["reason"]) for s in stored["sites"]] == [
        (d.id, str(d.strategy), d.reason.value if d.reason else None) for d in decisions
    ]
    assert [Plan.from_json(plan.to_json()) for plan in plans] == plans

    for plan, line in zip(plans, report.summary().splitlines(), strict=True):
        overlapped, of_all, merged, left = COUNTS.search(line).groups()  # type: ignore[union-attr]
        reasons = Counter({name: int(n) for name, n in (part.rsplit(" ", 1) for part in (left or "").split(", ") if part)})
        assert int(of_all) == len(plan.decisions) == int(overlapped) + int(merged or 0) + reasons.total()
        assert reasons == Counter(d.reason.value for d in plan.decisions if d.reason)

    rows = report.rows()
    assert [row["strategy"] for row in rows] == [str(d.strategy) for d in decisions]
    assert [row["line"] for row in rows] == [line_of(d.source) for d in decisions]

    outcomes = [outcome_of(str(d.strategy), d.reason.value if d.reason else None) for d in decisions]
    shown = html.data(stored)
    assert [site["outcome"] for site in shown["sites"]] == [outcome.name for outcome in outcomes]
    assert [site["line"] for site in shown["sites"]] == [line_of(d.source) for d in decisions]
    assert {site["outcome"] for site in shown["sites"]} <= shown["outcomes"].keys()
    assert sum(o.is_overlapped for o in outcomes) == sum(d.overlapped for d in decisions)

    notebook = report._repr_html_()
    for name, count in Counter(outcome.name for outcome in outcomes).items():
        assert notebook.count(f'class="{name}"') >= count


def test_metrics_are_the_counts_of_the_report() -> None:
    """Flat numbers for loggers. Their names begin with the prefix, and nothing is missing without a plan."""
    draw = random.Random(3)
    report = Report([random_plan(draw, "forward"), random_plan(draw, "backward")])
    found = report.metrics("train/")
    assert found["train/collectives"] == len(report.decisions) > 0 and found["train/graphs"] == 2
    assert found["train/overlapped"] == sum(d.overlapped for d in report.decisions)
    assert Report([]).metrics().keys() == {name.replace("train/", "ub_overlap/") for name in found}
    assert all(type(value) is float for value in found.values())
    assert repr(report) == report.summary(), "what a REPL prints"

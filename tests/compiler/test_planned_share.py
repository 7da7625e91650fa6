"""What plans and reports have of split collectives: the share that is hidden, and the finishes that ranks share."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.compiler.dags import Dag, c10d
from tests.compiler.test_windows import layers, plan
from ub_overlap import _torch_compat as compat
from ub_overlap.compiler.options import parse
from ub_overlap.compiler.reports.report import Report


def test_the_report_has_the_planned_share() -> None:
    """A split site that was not timed shows what the plan hides of its transfer."""
    found = plan(layers())
    shares = [row["hidden bytes / reason"] for row in Report([found]).rows()]
    assert shares[0] == "" and shares[1:] == ["100% planned"] * 2
    window = found.decisions[1].window
    assert window is not None and replace(window, exposed_us=window.transfer_us / 4).hidden == pytest.approx(0.75)
    assert replace(window, exposed_us=2 * window.transfer_us).hidden == replace(window, transfer_us=0.0).hidden == 0.0


def test_the_plan_has_the_finishes_that_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks compare where all_reduces finish, which send their sums there; those of reduce_scatters are each rank's own."""
    monkeypatch.setattr(compat, "group_size", lambda name: 2)  # the graph is not run
    d = Dag(2)
    x, gradient = d.input("x", 4096, 4096), d.input("gradient", 4096, 4096)
    first = d.call(c10d.wait_tensor.default, d.call(c10d.all_reduce.default, d.mm(d.t(gradient), x), "sum", d.group))
    second = d.scatter(d.mm(d.t(x), gradient))
    d.output(first, second, d.mm(x, gradient), d.mm(gradient, d.mm(x, x)))
    options = parse({"profile": "h200", "overrides": [{"strategy": "split"}]}, frozenset())[0]
    windows = [site["window"] for site in plan(d, options, "backward").shared["sites"]]
    assert [len(w) for w in windows] == [3, 2], windows
    assert sorted([*windows[0][1:], windows[1][1]]) == [0, 1, 2]

"""The share of a split collective's transfer that the plan hides, as reports show it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.compiler.test_windows import layers, plan
from ub_overlap.compiler.reports.report import Report


def test_the_report_has_the_planned_share() -> None:
    """A split site that was not timed shows what the plan hides of its transfer."""
    found = plan(layers())
    shares = [row["hidden bytes / reason"] for row in Report([found]).rows()]
    assert shares[0] == "" and shares[1:] == ["100% planned"] * 2
    window = found.decisions[1].window
    assert window is not None and replace(window, exposed_us=window.transfer_us / 4).hidden == pytest.approx(0.75)
    assert replace(window, exposed_us=2 * window.transfer_us).hidden == replace(window, transfer_us=0.0).hidden == 0.0

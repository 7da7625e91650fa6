"""Tests of the guide pages of overrides and planner: rules parse, and every Megatron switch is mapped."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ub_overlap.cli import plan as plan_verb
from ub_overlap.compiler.overrides.megatron import ENTRIES
from ub_overlap.compiler.overrides.override_set import parse_overrides

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guide"
TEXT = (GUIDE / "overriding_strategies.md").read_text()
PLANNER = (GUIDE / "planner.md").read_text()
RULES = re.findall(r"\{[^{}]*\"strategy\": [^{}]*\}", TEXT)


@pytest.mark.parametrize("rule", RULES)
def test_rules_of_the_page_parse(rule: str) -> None:
    parse_overrides([json.loads(rule)])


def test_page_is_complete() -> None:
    assert len(RULES) >= 8
    switches = (
        "ub_overlap_ag",
        "ub_overlap_rs",
        "ub_overlap_rs_dgrad",
        "ub_bulk_wgrad",
        "ub_bulk_dgrad",
        "tp_comm_overlap_cfg",
    )
    for name in (*switches, *(e for e in ENTRIES if e not in ("proj_wgrad", "fc2_wgrad"))):
        assert f"`{name}`" in TEXT, name
    for name in plan_verb.SIZES:
        assert f"--{name.replace('_', '-')}" in PLANNER

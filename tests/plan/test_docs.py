"""docs/planning.md: every rule in it is one, and every switch that it must map is there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ub_overlap.cli import plan as verb
from ub_overlap.compiler.overrides.megatron import ENTRIES
from ub_overlap.compiler.overrides.rules import parse_rules

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "planning.md").read_text()
RULES = re.findall(r"\{[^{}]*\"strategy\": [^{}]*\}", TEXT)


@pytest.mark.parametrize("rule", RULES)
def test_rules_in_the_text_are_rules(rule: str) -> None:
    parse_rules([json.loads(rule)])


def test_all_of_it_is_there() -> None:
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
    for name in verb.SIZES:
        assert f"--{name.replace('_', '-')}" in TEXT

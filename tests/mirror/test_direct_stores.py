"""benchmarks.direct_stores: rows of a profile for groups that are larger than the machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.direct_stores import merge
from tests.harness.programs import run_program
from ub_overlap.compiler.cost.profile import Profile

PROFILES = Path(__file__).parents[2] / "compiler" / "cost" / "profiles"


@pytest.mark.tier("test")
def test_rows_of_a_profile(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text((PROFILES / "cpu.json").read_text())
    arguments = ["--ranks", "3,4", "--device", "cpu", "--quick", "--profile", str(path)]
    finished = run_program(2, "benchmarks.direct_stores", arguments)
    assert finished.code == 0, finished.output[-3000:]
    profile = Profile.from_json(path.read_text(), str(path))
    assert profile.direct is not None
    assert {row[1] for row in profile.direct.matmuls} == {3, 4}
    assert all(row[-1] > 0 for row in profile.direct.matmuls)


def test_rows_of_other_groups_stay() -> None:
    old = {
        "source": "calibrate",
        "direct": {"link_gbs": 300.0, "matmuls": [["bfloat16", 2, 1, 1, 1, 5.0], ["bfloat16", 8, 1, 1, 1, 6.0]]},
    }
    new = merge(old, [{"link_gbs": 200.0, "matmuls": [["bfloat16", 8, 2, 2, 2, 7.0]]}], "a command")
    assert new["direct"] == {"link_gbs": 300.0, "matmuls": [["bfloat16", 2, 1, 1, 1, 5.0], ["bfloat16", 8, 2, 2, 2, 7.0]]}
    assert json.loads(json.dumps(new)) == new and new["source"] == "calibrate; direct: a command"

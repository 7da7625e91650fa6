"""Tests of a tp_comm_overlap_cfg as rules: the rule of each entry, warnings and errors."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.compiler.rank_compile import FORCE, build, decisions_of
from tests.harness.ranks import PATIENCE_S, RankPool
from ub_overlap.cli import main
from ub_overlap.compiler.options import parse
from ub_overlap.compiler.overrides.override_set import parse_overrides
from ub_overlap.runtime.errors import OptionError

LLAMA = "tests.models.dtensor_llama"
# Entries as frameworks ship them, with every field.
CFG: dict[str, Any] = {
    "qkv_fprop": {"method": "ring_exchange", "aggregate": 1},
    "qkv_dgrad": {"method": "bulk", "num_sm": 4, "set_sm_margin": 0},
    "qkv_wgrad": {"method": "bulk", "num_sm": 24, "cga_size": 2},
    "proj_fprop": {"method": "pipeline", "num_splits": 2, "set_sm_margin": True, "atomic_gemm": False, "use_ce": 1},
    "proj_dgrad": {"method": "ring_exchange", "is_reduce_scatter": 0},
    "fc1_fprop": {},
    "fc1_dgrad": {"method": "ring_exchange", "is_reduce_scatter": 1},
    "fc2_fprop": {"fp8_buf": True},
    "fc2_dgrad": {"method": "ring_exchange", "num_splits": 8},
    "fc2_wgrad": {"method": "external"},
}
TOLD = [
    "qkv_dgrad.num_sm", "qkv_wgrad.num_sm", "qkv_wgrad.cga_size", "proj_fprop.set_sm_margin", "fc2_fprop.fp8_buf",
    "fc2_dgrad.num_splits", "fc2_wgrad.method=external",
]  # fmt: skip


def test_every_entry() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rules = parse_overrides(CFG).rules
    assert [str(w.message).partition("here: ")[2] for w in caught] == [", ".join(TOLD)], "one warning names all of it"
    assert [(r.module[0], r.kind, r.phase, r.strategy, r.optional) for r in rules] == [
        ("*.wq", "all_gather*", "forward", "pipelined:chunks=R/2", False),
        ("*.wq", "all_gather*", "backward", "bulk", True),
        ("*.wq", "*reduce_scatter", "backward", "bulk", False),
        ("*.wo", "*reduce_scatter", "forward", "pipelined:stripes=2", False),
        ("*.wo", "all_gather*", "backward", "pipelined", False),
        ("*.w1", "all_gather*", "forward", "pipelined", False),
        ("*.w1", "*reduce_scatter", "backward", "pipelined", False),
        ("*.w2", "*reduce_scatter", "forward", "pipelined:stripes=4", False),
        ("*.w2", "all_gather*", "backward", "pipelined", False),
    ]


@pytest.mark.parametrize(
    ("entry", "field", "got", "expected"),
    [
        ({"qkv_fprop": {"method": "pipeline"}}, "qkv_fprop.method", "pipeline", "'ring_exchange'"),
        ({"proj_fprop": {"method": "bulk"}}, "proj_fprop.method", "bulk", "'pipeline' or 'ring_exchange'"),
        ({"fc1_wgrad": {"method": "ring_exchange"}}, "fc1_wgrad.method", "ring_exchange", "'bulk'"),
        ({"proj_fprop": {"num_splits": 0}}, "proj_fprop.num_splits", "0", "from 1 to 64"),
        ({"proj_fprop": {"num_splits": "4"}}, "proj_fprop.num_splits", "'4'", "from 1 to 64"),
        ({"qkv_fprop": {"aggregate": 2}}, "qkv_fprop.aggregate", "2", "true or false"),
        ({"qkv_fprop": {"is_reduce_scatter": 1}}, "qkv_fprop.is_reduce_scatter", "1", "0: with method 'ring_exchange'"),
        ({"qkv_fprop": "ring_exchange"}, "qkv_fprop", "ring_exchange", "a table with method"),
    ],
    ids=str,
)
def test_what_cannot_be(entry: dict[str, Any], field: str, got: str, expected: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse({"overrides": entry}, frozenset())
    assert f"{field}=" in caught.value.got and got in caught.value.got and expected in caught.value.expected


YAML = """
qkv_fprop: {method: ring_exchange, aggregate: true}
proj_fprop:
  method: pipeline
  num_splits: 2
  num_sm: 24
"""


def test_yaml_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("yaml")
    path = tmp_path / "cfg.yaml"
    path.write_text(YAML)
    with pytest.warns(UserWarning, match=r"cfg.yaml: without effect here: proj_fprop.num_sm"):
        ours, _ = parse({"overrides": str(path)}, frozenset())
    assert [r.strategy for r in ours.overrides.rules] == ["pipelined:chunks=R/2", "pipelined:stripes=2"]
    assert main(["import-cfg", str(path), "--json"]) == 0
    output = capsys.readouterr()
    assert parse_overrides(json.loads(output.out)) == ours.overrides, "what is printed is what the option takes"
    assert output.err == "without effect here: proj_fprop.num_sm\n"
    assert main(["import-cfg", str(path)]) == 0
    assert "pipelined:stripes=2" in capsys.readouterr().out


def test_yaml_without_pyyaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)  # makes its import fail
    path = tmp_path / "cfg.yaml"
    path.write_text(YAML)
    with pytest.raises(OptionError, match="cfg.yaml") as caught:
        parse({"overrides": path}, frozenset())
    assert "PyYAML" in caught.value.expected and "JSON" in caught.value.fix
    path.write_text(json.dumps({"qkv_fprop": {}}))
    assert len(parse({"overrides": path}, frozenset())[0].overrides.rules) == 1, "JSON is YAML too, and needs nothing"


def test_import_of_something_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"optimizer": {"lr": 1}}')
    assert main(["import-cfg", str(path)]) == 2
    error = capsys.readouterr().err
    assert "not a tp_comm_overlap_cfg" in error and str(path) in error and "optimizer" in error and "qkv_fprop" in error


@pytest.mark.tier("test")
def test_import_needs_no_torch(tmp_path: Path) -> None:
    path = tmp_path / "cfg.json"
    path.write_text(json.dumps({"fc1_fprop": {"method": "ring_exchange"}}))
    code = (
        f"import sys; from ub_overlap.cli import main; main(['import-cfg', {str(path)!r}]); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S, capture_output=True)


def decided(rank: int, world: int) -> tuple[dict[str, str], list[str]]:
    case = build(rank, world, LLAMA, {"sequence": True})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        decisions = decisions_of(case.module, case.inputs, {**FORCE, "memory_budget": 0, "overrides": CFG})
    messages = [str(w.message) for w in caught if "ub_overlap" in str(w.message)]
    return {f"{d.phase} {d.module.rpartition('.')[2]} {d.kind.value}": str(d.strategy) for d in decisions}, messages


@pytest.mark.tier("full")
def test_a_cfg_decides_a_llama_block(pool2: RankPool) -> None:
    for sites, messages in pool2.run(decided):
        assert sites["forward wq all_gather_matmul"] == "pipelined:chunks=1"
        assert sites["forward wo matmul_reduce_scatter"] == "pipelined:stripes=2"
        assert sites["forward w1 all_gather_matmul"] == "pipelined"
        assert sites["forward w2 matmul_reduce_scatter"] == "pipelined:stripes=4"
        assert sites["backward w2 all_gather_matmul"] == "pipelined"
        assert "bulk" in sites.values(), sites
        assert [t for t in messages if "match no site" in t] == []

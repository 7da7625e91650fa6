"""The benchmark of decode runs on CPU ranks and stores a complete document. No result depends on timing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.decode.table import text
from tests.test_benchmarks import FACTS, on_cpu_ranks, printed

OURS = {"one_shot", "two_shot", "one_shot + norm", "two_shot + norm"}


@pytest.mark.tier("full")
def test_decode_on_cpu_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "decode.json"
    on_cpu_ranks(2, "benchmarks.decode", ["--bytes", "1k,16k", "--iters", "2", "--warm", "1", "--json", str(path)])
    document: dict[str, Any] = json.loads(path.read_text())
    assert document.keys() >= FACTS and document["benchmark"] == "decode"
    assert [row["bytes"] for row in document["rows"]] == [1 << 10, 16 << 10]
    for row in document["rows"]:
        assert row["us"].keys() == {"nccl", "nccl + norm", *OURS}
        assert row["error"].keys() == OURS and all(0 <= error < 1e-4 for error in row["error"].values())
        assert set(row["why"].values()) == {"needs CUDA"}
    assert "16 KiB" in printed(path, capsys, monkeypatch)


@pytest.mark.tier("full")
def test_mirror_on_cpu_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes in the place of four ranks: only ours is timed, and the results of one_shot are those of these roles."""
    path = tmp_path / "mirror.json"
    options = ["--mirror", "4", "--bytes", "16k", "--iters", "2", "--warm", "1", "--json", str(path)]
    on_cpu_ranks(2, "benchmarks.decode", options)
    document: dict[str, Any] = json.loads(path.read_text())
    assert document["ranks"] == 4 and "Mirror of 4 ranks" in document["mirror"]
    (row,) = document["rows"]
    assert row["us"].keys() == OURS and not row["why"]
    assert row["error"].keys() == {"one_shot", "one_shot + norm"} and all(0 <= error < 1e-4 for error in row["error"].values())
    assert "Mirror of 4 ranks" in printed(path, capsys, monkeypatch)


@pytest.mark.tier("full")
def test_tiny_layers_on_cpu_ranks(tmp_path: Path) -> None:
    path = tmp_path / "layers.json"
    out = on_cpu_ranks(2, "benchmarks.decode", ["--tiny", "--iters", "2", "--warm", "1", "--json", str(path)])
    document: dict[str, Any] = json.loads(path.read_text())
    assert document.keys() >= FACTS and [row["batch"] for row in document["layers"]] == [3]
    for row in document["layers"]:
        variants = row["variants"]
        assert variants.keys() == {"compute", "inductor", "torch", "ours"}
        assert variants["ours"]["sites"] == "4 one_shot" and 0 <= variants["ours"]["error"] < 1e-4
        assert all(variants[name]["step"] > 0 for name in ("compute", "inductor", "ours"))
        assert variants["torch"]["why"] == {"*": "needs CUDA"}
    assert "4 one_shot" in out


def test_layers_that_miss_their_goal_are_named() -> None:
    times = {"compute": 0.8, "inductor": 1.0, "ours": 0.95}
    variants = {name: {"step_g": ms, "why": {}, "sites": ""} for name, ms in times.items()}
    row = {"size": "8b", "batch": 1, "layers": 8, "context": 512, "variants": variants}
    document = {"ranks": 2, "device": "cuda", "rows": [], "layers": [row], "ours": {"ours": {}}}
    assert "8b batch 1: ours hides 25%, goal 50%" in text(document)
    variants["ours"]["step_g"] = 0.89
    assert "nothing is missed" in text(document)


def test_what_is_missed_is_named() -> None:
    row = {"bytes": 16 << 10, "rows": 1, "us": {"nccl + norm": 7.0, "one_shot + norm": 8.0}, "why": {}}
    missed = text({"ranks": 2, "device": "cuda", "rows": [row]})
    assert "16 KiB: 8.0 us, goal 6" in missed and "16 KiB: 8.0 us, nccl + norm 7.0" in missed
    assert "nothing is missed" in text({"ranks": 4, "device": "cuda", "rows": [row | {"us": {"one_shot + norm": 5.0}}]})

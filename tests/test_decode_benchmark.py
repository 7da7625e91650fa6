"""The benchmark of decode runs on CPU ranks and stores a complete document. No result depends on timing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.decode.table import text
from tests.test_benchmarks import FACTS, printed, torchrun

OURS = {"one_shot", "two_shot", "one_shot + norm", "two_shot + norm"}


def test_decode_on_cpu_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "decode.json"
    torchrun(2, "benchmarks.decode", ["--bytes", "1k,16k", "--iters", "2", "--warm", "1", "--json", str(path)])
    document: dict[str, Any] = json.loads(path.read_text())
    assert document.keys() >= FACTS and document["benchmark"] == "decode"
    assert [row["bytes"] for row in document["rows"]] == [1 << 10, 16 << 10]
    for row in document["rows"]:
        assert row["us"].keys() == {"nccl", "nccl + norm", *OURS}
        assert row["error"].keys() == OURS and all(0 <= error < 1e-4 for error in row["error"].values())
        assert set(row["why"].values()) == {"needs CUDA"}
    assert "16 KiB" in printed(path, capsys, monkeypatch)


def test_what_is_missed_is_named() -> None:
    row = {"bytes": 16 << 10, "rows": 1, "us": {"nccl + norm": 7.0, "one_shot + norm": 8.0}, "why": {}}
    missed = text({"ranks": 2, "device": "cuda", "rows": [row]})
    assert "16 KiB: 8.0 us, goal 6" in missed and "16 KiB: 8.0 us, nccl + norm 7.0" in missed
    assert "nothing is missed" in text({"ranks": 4, "device": "cuda", "rows": [row | {"us": {"one_shot + norm": 5.0}}]})

"""The benchmark of pipeline parallelism runs on CPU ranks and stores a complete document. No result depends on timing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report import markdown
from tests.test_benchmarks import FACTS, on_cpu_ranks

pytestmark = pytest.mark.tier("full")


def test_pipeline_on_cpu_ranks(tmp_path: Path) -> None:
    path = tmp_path / "pipeline.json"
    sizes = ["--mib", "1", "--width", "32", "--tokens", "16", "--microbatches", "4", "--iters", "2", "--warm", "1"]
    flags = ["--device", "cpu", "--compile", "--piece-mib", "1", *sizes, "--schedules", "ZBVZeroBubble"]
    out = on_cpu_ranks(2, "benchmarks.pipeline", [*flags, "--json", str(path)])
    document: dict[str, Any] = json.loads(path.read_text())
    assert document.keys() >= FACTS and document["benchmark"] == "pipeline"
    messages = [row for row in document["rows"] if row["kind"] == "message"]
    steps = [row for row in document["rows"] if row["kind"] == "step"]
    assert [row["both_ways"] for row in messages] == [False, True]
    for row in messages:
        kinds = ("message", "both", "matmul_during")
        assert row["ms"].keys() == {
            "matmul",
            "long_matmul",
            *(f"{transport} {kind}" for transport in ("c10d", "ours") for kind in kinds),
        }
    assert [row["schedule"] for row in steps] == ["ZBVZeroBubble"]
    for row in steps:
        assert row["difference"] < 0.02, "the transports give other gradients"
        assert row["ms"].keys() == {"c10d", "ours", "deferred"}
        assert all(ms > 0 for ms in row["ms"].values())
    assert "ZBVZeroBubble" in out and "matmul loses" in markdown(document)

"""The benchmark of expert parallelism runs on CPU ranks and stores a complete document. No result depends on timing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.expert_parallel.model import make_routes
from benchmarks.expert_parallel.table import text
from benchmarks.parallel.table import predicted_columns
from benchmarks.waterfall import StepTimes, compare
from tests.test_benchmarks import FACTS, on_cpu_ranks, printed


@pytest.mark.tier("full")
def test_expert_parallel_on_cpu_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our backend computes what eager does, with its exchanges split. Counts stay: one all_to_all of the forward."""
    path = tmp_path / "expert_parallel.json"
    split = 'split={"overrides": [{"strategy": "split"}]}'
    arguments = ["--tiny", "--device", "cpu", "--variants", "compute,eager,split", "--ours", split]
    on_cpu_ranks(2, "benchmarks.expert_parallel", [*arguments, "--routing", "skewed", "--json", str(path)])
    document: dict[str, Any] = json.loads(path.read_text())
    assert document.keys() >= FACTS and document["benchmark"] == "expert_parallel"
    (row,) = document["rows"]
    for name, variant in row["variants"].items():
        assert variant["step"] > 0 and not variant["why"], name
    assert row["variants"]["split"]["sites"] == "1 none, 4 split" and 0 <= row["variants"]["split"]["error"] < 1e-2
    predicted = row["variants"]["split"]["predicted"]
    assert predicted["unknown"] == 1 and predicted["exposed_ms"] >= 0 and "predicted" not in row["variants"]["eager"]
    assert "tiny, 1 layers, 24 tokens, 2 experts a rank, skewed" in printed(path, capsys, monkeypatch)


@pytest.mark.tier("full")
def test_checkpointed_layers(tmp_path: Path) -> None:
    """Backward of ours repeats the dispatch only: 3 exchanges of forward, 3 of backward."""
    path = tmp_path / "expert_parallel.json"
    arguments = ["--tiny", "--device", "cpu", "--checkpoint", "--variants", "compute,eager,ours", "--ours", "ours={}"]
    on_cpu_ranks(2, "benchmarks.expert_parallel", [*arguments, "--routing", "balanced", "--json", str(path)])
    (row,) = json.loads(path.read_text())["rows"]
    assert all(variant["step"] > 0 and not variant["why"] for variant in row["variants"].values())
    assert row["variants"]["ours"]["sites"] == "6 none" and 0 <= row["variants"]["ours"]["error"] < 1e-2
    assert "2 experts a rank, balanced, checkpointed" in text({"rows": [row]})


def test_predictions_next_to_profiled_times() -> None:
    """A step exposes 0.4 ms of copies and 0.2 of waits: 2.4 ms less than Inductor's. Gaps are no communication."""
    classes = {
        "compute": {"other matmuls": 9000.0},
        "inductor": {"other matmuls": 9000.0, "NCCL, exposed": 3000.0, "gaps": 500.0},
        "ours": {"other matmuls": 9000.0, "local copies": 400.0, "waits": 200.0, "gaps": 700.0},
    }
    steps = {name: StepTimes(sum(times.values()), times) for name, times in classes.items()}
    variants: dict[str, Any] = {name: {"step": step.total_us / 1e3, "why": {}} for name, step in steps.items()}
    variants["ours"]["predicted"] = {"exposed_ms": 0.5, "saved_ms": 2.5, "unknown": 1}
    row: dict[str, Any] = {"size": "16b", "layers": 2, "tokens": 64, "own": 2, "routing": "balanced", "variants": variants}
    predicted = {"exposed": "-", "exposed predicted": "0.50", "hides": "-", "hides predicted": "2.50"}
    assert predicted_columns(row, "ours", "inductor") == predicted
    row["waterfall"] = compare(steps, {})
    assert predicted_columns(row, "ours", "inductor") == {**predicted, "exposed": "0.60", "hides": "2.40"}
    theirs = {"exposed": "3.00", "exposed predicted": "-", "hides": "-", "hides predicted": "-"}
    assert predicted_columns(row, "inductor", "inductor") == theirs
    shown = text({"rows": [row]})
    assert "exposed, profiled" in shown and "ours: no prediction of 1 collectives" in shown


@pytest.mark.parametrize("routing", ["balanced", "skewed"])
def test_routes(routing: str) -> None:
    """A token goes to k different experts. Skewed, the first expert gets the most."""
    chosen, scores = make_routes(64, 8, 2, routing, rank=1)
    assert chosen.shape == scores.shape == (64, 2) and bool((chosen[:, 0] != chosen[:, 1]).all())
    counts = torch.bincount(chosen.reshape(-1), minlength=8).tolist()
    assert (counts == [16] * 8) if routing == "balanced" else (counts[0] == max(counts) > 2 * min(counts))

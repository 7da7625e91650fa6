"""The benchmark of prefetches runs on the CPU and stores a complete document. No result depends on timing."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.blocks.model import SIZES
from benchmarks.prefetch.__main__ import first_parts, main, outputs
from benchmarks.prefetch.table import saved_us
from tests.test_benchmarks import FACTS, printed


def test_prefetches_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "prefetch.json"
    sizes = ["--size", "tiny", "--ranks", "2", "--batch", "1,3", "--mib", "1,2"]
    monkeypatch.setattr(sys, "argv", ["prefetch", "--cpu", *sizes, "--json", str(path)])
    main()
    document: dict[str, Any] = json.loads(path.read_text())
    assert document.keys() >= FACTS and document["benchmark"] == "prefetch"
    assert [(row["site"], row["batch"]) for row in document["rows"]] == [
        (site, batch) for site in ("q, k, v", "gate, up") for batch in (1, 3)
    ]
    assert all(list(row["us"]) == ["matmuls", "0", "1", "2"] and min(row["us"].values()) > 0 for row in document["rows"])
    assert "2 MiB saves" in printed(path, capsys, monkeypatch)


def test_savings_are_against_the_same_wait() -> None:
    assert saved_us({"us": {"matmuls": 20.0, "0": 26.0, "8": 22.0, "16": 27.0}}) == {"8": 4.0, "16": -1.0}


def aligned(*shape: int) -> torch.Tensor:
    """Return zeros that begin at a cache line, as on a GPU."""
    flat = torch.zeros(torch.Size(shape).numel() + 32)
    return flat[-flat.data_ptr() % 128 // 4 :][: torch.Size(shape).numel()].view(shape)


def test_the_first_weight_is_prefetched_first() -> None:
    """Of each row of a weight [N, K] the first part, as the op does."""
    weights = [aligned(4, 128), aligned(2, 96)]
    (only,) = first_parts(weights, 4 * 128)
    assert only[1:] == (4, 512, 128)
    assert [part[1:] for part in first_parts(weights, 4 * 512 + 2 * 256)] == [(4, 512, 512), (2, 384, 256)]
    assert first_parts(weights, 255) == []


def test_matmuls_of_a_rank() -> None:
    assert outputs(SIZES["8b"], 2) == {"q, k, v": [2048, 512, 512], "gate, up": [7168, 7168]}

"""The benchmark of matmuls next to split collectives runs on CPU ranks. No result depends on timing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.concurrent_matmul.__main__ import COLLECTIVES, ConcurrentCase, Stopwatch
from benchmarks.concurrent_matmul.table import NAME, ratio, text
from benchmarks.report import TEXTS
from tests.harness.ranks import RankPool
from ub_overlap.tools.rank_process import World


def measure_all(rank: int, world: int) -> list[dict[str, Any]]:
    """Return the rows of all collectives, then check that a wrong result is noticed."""
    group: Any = dist.group.WORLD
    here = World(rank, world, torch.device("cpu"), group.group_name, dist.new_group(backend="gloo"))
    cases = [ConcurrentCase(here, collective, 1, (64, 32, 16)) for collective in COLLECTIVES]
    rows = [case.measure(rounds=1) for case in cases]
    result = torch.zeros(512, 1024, dtype=torch.bfloat16)
    with pytest.raises(AssertionError, match="wrong numbers: all_gather differs"):
        cases[0].check(result)
    call = cases[0].call(Stopwatch(here), has_collective=True, has_matmul=True)
    cases[0].check_replay(lambda: result.copy_(call()), result)
    with pytest.raises(AssertionError, match="wrong numbers: all_gather differs"):
        cases[0].check_replay(lambda: None, result)  # what an earlier replay has left does not count
    return rows


def test_all_collectives_on_cpu_ranks(pool2: RankPool) -> None:
    rows = pool2.run(measure_all)[0]
    assert [row["collective"] for row in rows] == [*COLLECTIVES]
    for row in rows:
        assert row["ms"].keys() == {"collective", "alone", "concurrent"} and all(ms > 0 for ms in row["ms"].values())
        assert row["why"] == {"_g": "needs CUDA"} and row["mib"] == 1


def test_table() -> None:
    """The ratio is that of the matmuls, and the worst of all is compared with the goal."""
    ms = {"collective": 0.5, "alone": 1.0, "concurrent": 1.02, "collective_g": 0.5, "alone_g": 1.0, "concurrent_g": 1.1}
    row = {"collective": "all_gather", "mib": 32, "ms": ms, "why": {}}
    assert ratio(row, "") == 1.02 and ratio(row, "_g") == 1.1 and ratio(row | {"ms": {"alone": 1.0}}, "") is None
    shown = TEXTS[NAME]({"device": "cuda", "rows": [row]})
    times = ["500.0", "1000.0", "1020.0", "1.020", "500.0", "1000.0", "1100.0", "1.100"]
    assert shown.splitlines()[2].split() == ["all_gather", "32", *times]
    assert "worst 1.100, all_gather of 32 MiB; the goal of 1.05 is missed" in shown
    assert "goal" not in text({"device": "cpu", "rows": [row]})

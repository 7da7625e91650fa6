"""Copies run concurrently with matmuls, and the statistics report it."""

from __future__ import annotations

import pytest

from tests.harness.ranks import RankPool

from . import rank_sessions


@pytest.mark.parametrize("world", [2, 4])
def test_copies_run_beside_matmuls(pools: dict[int, RankPool], world: int) -> None:
    for found in pools[world].run(rank_sessions.latched, timeout=60):
        assert found["bad"] == []
        stats = found["stats"]["/latched.ag"]
        assert (stats["calls"], stats["strategy"], stats["transport"]) == (1, "pipelined", "shared memory")
        assert stats["bytes_copied"] == (world - 1) * 4000 * 64 * 4
        assert 0 < stats["bytes_overlapped"] <= stats["bytes_copied"]
        matmuls = [step for step in found["trace"] if step[2] == "matmul"]
        copies = [step for step in found["trace"] if step[1:3] == ("COPY", "copy")]
        assert copies[0][3] < matmuls[0][4]
        matmuls = [step for step in found["scatter"] if step[2] == "matmul"]
        copies = [step for step in found["scatter"] if step[1:3] == ("COPY", "copy")]
        assert matmuls[0][4] <= copies[0][3] < matmuls[1][4]

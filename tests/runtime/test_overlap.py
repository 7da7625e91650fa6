"""Copies run concurrently with matmuls, and the statistics report it."""

from __future__ import annotations

import pytest

from tests.harness.ranks import RankPool

from . import rank_sessions


@pytest.mark.parametrize("world", [2, 4])
def test_copies_run_beside_matmuls(pools: dict[int, RankPool], world: int) -> None:
    for found in pools[world].run(rank_sessions.latched):
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


def test_direct_products_travel_with_their_matmul(pools: dict[int, RankPool]) -> None:
    """A direct scatter has one matmul and no copy; an all_reduce copies in its second phase alone."""
    shard = 40 * 3 * 4  # bytes
    for found in pools[4].run(rank_sessions.direct_steps):
        assert found["bad"] == []
        assert [step[1:3] for step in found["scatter"] if step[2] in ("matmul", "copy")] == [("COMPUTE", "matmul")]
        assert {step[1] for step in found["scatter"]} == {"COMPUTE"}
        copies = [step for step in found["reduce"] if step[1:3] == ("COPY", "copy")]
        assert len(copies) == 3 and sum(step[2] == "matmul" for step in found["reduce"]) == 1
        stats = found["stats"]["/direct.rs"]
        assert (stats["strategy"], stats["bytes_copied"], stats["bytes_overlapped"]) == ("direct", 3 * shard, 3 * shard)
        assert found["stats"]["/direct.ar"]["bytes_copied"] == 6 * shard

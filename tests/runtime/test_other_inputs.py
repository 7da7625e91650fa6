"""A batch of another size or dtype on one rank is an error about inputs, not about control flow."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.ranks import RankPool

from . import rank_inputs


@pytest.mark.parametrize(
    ("how", "own", "other"),
    [("batch", "float32, input [32, 16]", "float32, input [64, 16]"), ("dtype", "float32, input", "bfloat16, input")],
)
def test_other_inputs(pools: dict[int, RankPool], tmp_path: Path, how: str, own: str, other: str) -> None:
    found = pools[2].run(rank_inputs.other_inputs, how, env={"UB_OVERLAP_CACHE_DIR": str(tmp_path)})
    for rank, seen in enumerate(found):
        assert (seen["error"], seen["ranks"]) == ("ShapeMismatchError", (1 - rank,)), seen
        assert "run one graph on different inputs" in seen["text"]
        assert "of module 'a'" in seen["text"]
        assert f"rank 0: {own}" in seen["text"], seen["text"]
        assert f"rank 1: {other}" in seen["text"], seen["text"]
        assert "batch size" in seen["text"]
        assert "control flow" not in seen["text"]

"""The float8 ops against fp64, within bounds derived from the formats (rank_float8.py), on 2 and 3 ranks."""

from __future__ import annotations

import pytest

from tests.harness.ranks import RankPool

from . import rank_float8


@pytest.mark.parametrize("world", [2, 3])
def test_values(pools: dict[int, RankPool], world: int) -> None:
    for rank, found in enumerate(pools[world].run(rank_float8.everything)):
        for what, bad in found.items():
            assert not bad, (rank, what, bad)

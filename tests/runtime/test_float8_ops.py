"""The float8 ops against fp64, within bounds derived from the formats (rank_float8.py), on 2 and 3 ranks."""

from __future__ import annotations

import pytest

from tests.harness.ranks import RankPool
from tests.harness.tiers import full_but

from . import rank_float8


@pytest.mark.parametrize("world", full_but([2], [2, 3]))
def test_values(pools: dict[int, RankPool], world: int) -> None:
    for rank, found in enumerate(pools[world].run(rank_float8.everything)):
        for what, bad in found.items():
            assert not bad, (rank, what, bad)

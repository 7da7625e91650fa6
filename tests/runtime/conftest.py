"""Pools of other sizes than the shared ones, and the check that nothing stays in /dev/shm."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.harness.ranks import RankPool


@pytest.fixture(scope="session")
def pools(pool2: RankPool, pool4: RankPool) -> Iterator[dict[int, RankPool]]:
    """Pools by size: 2, 3, 4 and 8 ranks."""
    three, eight = RankPool(3), RankPool(8)
    yield {2: pool2, 3: three, 4: pool4, 8: eight}
    three.close()
    eight.close()


def segments() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("ub_overlap-")}


@pytest.fixture(autouse=True)
def shm_is_clean() -> Iterator[None]:
    before = segments()
    yield
    assert segments() <= before, "a test left shared memory behind"

"""Rank pools by size, and the check that tests leave no shared memory open."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness.ranks import RankPool
from tests.harness.shared_memory import list_segments


@pytest.fixture(scope="session")
def pools(pool2: RankPool, pool4: RankPool) -> Iterator[dict[int, RankPool]]:
    """Return pools of 2, 3, 4 and 8 ranks by size."""
    three, eight = RankPool(3), RankPool(8)
    yield {2: pool2, 3: three, 4: pool4, 8: eight}
    three.close()
    eight.close()


@pytest.fixture(autouse=True)
def shm_is_clean() -> Iterator[None]:
    """Fail a test after which a process of this job can still hand out its segments, or a file has their names."""
    before = list_segments()
    yield
    assert list_segments() <= before, "the test left shared memory open"

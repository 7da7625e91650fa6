"""Session-wide pools of ranks. A conftest.py imports the names that its tests use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness.ranks import RankPool


@pytest.fixture(scope="session")
def pool2() -> Iterator[RankPool]:
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="session")
def pool3() -> Iterator[RankPool]:
    with RankPool(3) as pool:
        yield pool


@pytest.fixture(scope="session")
def pool4() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool

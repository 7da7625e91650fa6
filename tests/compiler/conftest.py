"""Fixtures of the compiler's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness.ranks import RankPool


@pytest.fixture(scope="session")
def pool3() -> Iterator[RankPool]:
    with RankPool(3) as pool:
        yield pool

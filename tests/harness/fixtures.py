"""Pools of ranks, and ranks that do not exist. A conftest.py imports the names that its tests use."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from tests.harness.fake_ranks import FakeRanks
from tests.harness.ranks import RankPool


@pytest.fixture
def fake2() -> FakeRanks:
    return FakeRanks(2)


@pytest.fixture
def fake4() -> FakeRanks:
    return FakeRanks(4)


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


@pytest.fixture(scope="module")
def hf2() -> Iterator[RankPool]:
    """Two ranks that import transformers."""
    yield from _importing_transformers(2)


@pytest.fixture(scope="module")
def hf4() -> Iterator[RankPool]:
    """Four such ranks."""
    yield from _importing_transformers(4)


def _importing_transformers(ranks: int) -> Iterator[RankPool]:
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed: pip install --no-deps -r tests/models/requirements.txt")
    with RankPool(ranks) as pool:
        yield pool

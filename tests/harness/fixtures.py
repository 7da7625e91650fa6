"""Pools of ranks. A conftest.py imports the names that its tests use."""

from __future__ import annotations

import importlib.util
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


@pytest.fixture(scope="module")
def hf2() -> Iterator[RankPool]:
    """Ranks that import transformers."""
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed: pip install --no-deps -r tests/models/requirements.txt")
    with RankPool(2) as pool:
        yield pool

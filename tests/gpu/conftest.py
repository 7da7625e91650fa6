"""The number of ranks that this machine's GPUs allow, and the skip of tests that need more."""

from __future__ import annotations

import os

import pytest


def gpus() -> int:
    """Return the number of GPUs, without initializing CUDA on a machine that has none."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def ranks_of_this_machine() -> int:
    """Return UB_OVERLAP_TEST_RANKS, or the number of all GPUs."""
    return int(os.environ.get("UB_OVERLAP_TEST_RANKS", "0")) or gpus()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--quick"):
        items[:] = [item for item in items if item.get_closest_marker("full") is None]


@pytest.fixture
def ranks() -> int:
    """Return the number of ranks of a test. Skip without two GPUs, unless UB_OVERLAP_TEST_RANKS asks for more ranks than GPUs:
    ranks then share GPUs."""
    found, wanted = gpus(), ranks_of_this_machine()
    if found == 0 or wanted < 2:
        pytest.skip(f"{found} GPUs, needs 2")
    return wanted

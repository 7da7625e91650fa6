"""How many GPUs there are, and the skip of tests that need more."""

from __future__ import annotations

import os

import pytest


def gpus() -> int:
    """GPUs of this machine, without starting CUDA where there is none."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


@pytest.fixture
def ranks() -> int:
    """Ranks for a program: UB_OVERLAP_TEST_RANKS, or all GPUs. Skips where there are fewer than two."""
    found = gpus()
    wanted = int(os.environ.get("UB_OVERLAP_TEST_RANKS", "0")) or found
    if found < 2:
        pytest.skip(f"{found} GPUs, needs 2")
    if wanted > found:
        pytest.skip(f"UB_OVERLAP_TEST_RANKS={wanted}, and there are {found} GPUs")
    return wanted

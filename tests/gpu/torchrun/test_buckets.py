"""Buckets of a compiled model with small shards: gradients of eager code, by Inductor and without it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.compiler.rank_buckets import run_blocks
from tests.gpu.lockstep import Lockstep


@pytest.mark.parametrize("options", [{"inner": "aot_eager"}, {"memory_budget": 0}], ids=["aot_eager", "inductor"])
def test_sharded_blocks(lockstep: Lockstep, options: dict[str, Any]) -> None:
    assert run_blocks(lockstep.rank, lockstep.ranks, options, str(lockstep.device)) == ""

"""Programs of others with expert and context parallelism: blocks of transformers, and context next to tensor parallelism."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from tests.context_parallel.rank_programs import compare_with_tensor_parallelism
from tests.gpu.lockstep import Lockstep
from ub_overlap.runtime.session import session

SPLIT: dict[str, Any] = {"overlap": "off", "overrides": [{"strategy": "split"}], "inner": "aot_eager"}


@pytest.mark.deadline(120)
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize(
    ("kind", "routing"), [("mixtral", "random"), ("qwen3_moe", "first"), ("deepseek_v3", "absent")], ids=lambda p: p
)
def test_blocks_of_transformers(lockstep: Lockstep, kind: str, routing: str) -> None:
    """With their experts on all ranks they compute what they do with all experts on one: also where one rank has all tokens
    or none."""
    from tests.models.hf_moe import EXPERTS, STRATEGIES, compare_block

    if EXPERTS % lockstep.ranks:
        pytest.skip(f"{EXPERTS} experts do not divide by {lockstep.ranks} ranks")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch._dynamo.reset()
    error, found = compare_block(lockstep.rank, lockstep.ranks, kind, SPLIT, routing, device=lockstep.device_type)
    lockstep.sync()
    session.check()
    assert error < 1e-4
    assert [strategy for *_, strategy in found] == STRATEGIES, found
    lockstep.note(f"error {error:.1e}")


@pytest.mark.deadline(120)
@pytest.mark.parametrize("form", ["ring", "ulysses"])
def test_context_next_to_tensor_parallelism(lockstep: Lockstep, form: str) -> None:
    """Pairs of ranks share a sequence, and pairs the heads of each layer."""
    if lockstep.ranks != 4:
        pytest.skip(f"it takes 4 ranks, not {lockstep.ranks}")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch._dynamo.reset()
    options = {"overlap": "force"} if lockstep.cuda else {"overlap": "force", "inner": "aot_eager"}
    error, plans = compare_with_tensor_parallelism(
        lockstep.rank, lockstep.ranks, form, options, form == "ring", True, device=lockstep.device_type
    )
    lockstep.sync()
    session.check()
    assert error < 1e-4
    decisions = [d for plan in plans for d in plan.decisions]
    overlapped = [d for d in decisions if d.overlapped]
    assert len(overlapped) >= 6, [(d.id, str(d.strategy), d.reason) for d in decisions]
    lockstep.note(f"{len(overlapped)} of {len(decisions)} overlapped, error {error:.1e}")

"""In-graph ZeRO-3 in float8: weights are gathered as float8, next to the model's kernels, with one all_reduce of scales."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.fp8.rank_fp8 import float8
from tests.gpu.cases import BF16
from tests.gpu.lockstep import Lockstep
from tests.models.case import on
from ub_overlap.runtime.session import session

LAYERS, WIDTH, SPLIT = 2, 256, [{"strategy": "split"}]


@pytest.mark.deadline(150)
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_gathered_weights(lockstep: Lockstep, inner: str) -> None:
    """A block has two weights. Gradients are in bf16, and every exchange but that of scales is split."""
    options: dict[str, Any] = {"fp8": {"recipe": "tensorwise"}, "inner": inner, "overlap": "force", "overrides": SPLIT}
    variant = {"layers": LAYERS, "width": WIDTH, "dtype": BF16}
    with on(lockstep.device):
        run = float8(lockstep.rank, lockstep.ranks, "tests.models.zero3", variant, options)
    lockstep.sync()
    session.check()
    weights, shard = 2 * LAYERS, WIDTH * WIDTH // lockstep.ranks
    sites = Counter((d.phase, d.kind.value, str(d.strategy), d.bytes) for d in run.decisions)
    assert sites == {
        ("forward", "all_reduce", "none", None): 1,
        ("forward", "all_gather", "split", shard): weights,
        ("backward", "reduce_scatter", "split", 2 * shard): weights,
    }
    worst = max(after for _, after in run.errors.values())
    assert worst < 0.2
    assert run.errors["output0"][1] > 2 * run.errors["output0"][0], "float8 has larger errors than bf16"
    lockstep.note(f"error {worst:.3f}, bf16 {max(before for before, _ in run.errors.values()):.3f}")

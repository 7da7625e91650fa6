"""Activation memory of weights that are gathered in float8: backward keeps them, or their shards and gathers again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.fp8.rank_fp8 import NO_ROWS, Run, float8
from tests.harness.ranks import RankPool
from tests.models.compare import error
from ub_overlap.compiler.plan.decision import Decision

LAYERS, WIDTH = 2, 64
VARIANT = {"layers": LAYERS, "width": WIDTH, "dtype": torch.bfloat16}
WEIGHTS, SHARD = 2 * LAYERS, WIDTH * WIDTH // 2


def budgets(rank: int, world: int, options: dict[str, Any], *limits: float | None) -> list[Run]:
    return [float8(rank, world, "tests.models.zero3", VARIANT, {**options, "memory_budget": limit}) for limit in limits]


def gathers(run: Run, phase: str) -> list[Decision]:
    return [d for d in run.decisions if d.phase == phase and "all_gather" in d.kind.value]


def kept_weights(run: Run) -> tuple[int, int]:
    """Return how many whole weights and how many shards are saved in one byte per element."""
    sizes = [torch.Size(shape).numel() for shape, dtype in run.saved if dtype.itemsize == 1]
    return sizes.count(2 * SHARD), sizes.count(SHARD)


@pytest.mark.tier("full")
@pytest.mark.parametrize(("recipe", "bound"), [("tensorwise", 0.0), ("delayed", 1e-3)])
def test_a_budget_of_float8_weights(pool2: RankPool, recipe: str, bound: float) -> None:
    """With 0 backward gathers all weights again, as float8 and next to its matmuls; with half of their bytes, half of them."""
    options = {"fp8": {"recipe": recipe}, "inner": "aot_eager", "overlap": "force", "overrides": [{"strategy": "split"}]}
    for whole, half, none in pool2.run(budgets, options, None, 0.5, 0):
        for run, again in ((whole, 0), (half, WEIGHTS // 2), (none, WEIGHTS)):
            assert kept_weights(run) == (WEIGHTS - again, again), run.saved
            assert [(str(d.strategy), d.bytes) for d in gathers(run, "backward")] == [("split", SHARD)] * again
            assert len(gathers(run, "forward")) == WEIGHTS
            assert all(error(run.values[name], value, name) <= bound for name, value in whole.values.items())
        for run, shards in ((half, WEIGHTS // 2), (none, WEIGHTS)):
            kept = [d.kept for d in gathers(run, "forward") if d.kept is not None]
            assert len(kept) == WEIGHTS and sum(k.keeps == "shard" for k in kept) == shards
            assert {(k.gathered_bytes, k.shard_bytes) for k in kept} == {(2 * SHARD, SHARD)}


@pytest.mark.tier("full")
@NO_ROWS
def test_a_budget_of_weights_that_are_cast_behind_the_gather(pool2: RankPool) -> None:
    """Scales of rows are those of whole weights, so 16 bits are gathered. Backward gathers and casts them again."""
    options = {"fp8": {"recipe": "rowwise"}, "inner": "aot_eager", "overlap": "force", "overrides": [{"strategy": "split"}]}
    for whole, half, none in pool2.run(budgets, options, None, 0.5, 0):
        for run, again in ((whole, 0), (half, WEIGHTS // 2), (none, WEIGHTS)):
            assert kept_weights(run) == (WEIGHTS - again, 0), run.saved
            assert [(str(d.strategy), d.bytes) for d in gathers(run, "backward")] == [("split", 2 * SHARD)] * again
            assert all(torch.equal(run.values[name], value) for name, value in whole.values.items())
        kept = [d.kept for d in gathers(none, "forward") if d.kept is not None]
        with_scales = 2 * SHARD + 4 * WIDTH
        assert {(k.keeps, k.gathered_bytes, k.shard_bytes) for k in kept} == {("shard", with_scales, 2 * SHARD)}

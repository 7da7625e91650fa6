"""Data parallelism within stages whose weight gradients are deferred: DistributedDataParallel and fully_shard."""

from __future__ import annotations

import pytest

from tests.harness.ranks import RankPool
from tests.harness.tiers import in_full

from . import rank_stage_data_parallel as ranks


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("1F1B", "ddp"),
        in_full(("Interleaved1F1B", "ddp")),
        in_full(("ZBVZeroBubble", "unused")),
        ("ZBVZeroBubble", "blocks"),
        in_full(("Interleaved1F1B", "fsdp")),
        in_full(("ZBVZeroBubble", "fsdp")),
        in_full(("ZBVZeroBubble", "low_precision")),
    ],
)
def test_gradients_are_those_of_one_process(pools: dict[int, RankPool], name: str, kind: str) -> None:
    """Also in the second step. Buckets are reduced once per step and stage, not per microbatch."""
    stages = 1 if name == "1F1B" else 2
    for found in pools[4].run(ranks.gradients, name, kind):
        assert found["wrong"] == [], found
        assert found["deferred"] >= ranks.STEPS * ranks.MICROBATCHES * stages, found
        assert found["reduced"] == (ranks.STEPS * stages if kind in ("ddp", "unused") else 0), found


def test_wrappings_that_reduce_each_microbatch_are_refused(pools: dict[int, RankPool]) -> None:
    for parts, buckets, static in pools[2].run(ranks.refused):
        assert parts.startswith("fully_shard is applied to parts of a stage only"), parts
        assert buckets.startswith("DistributedDataParallel is applied to parts of a stage only"), buckets
        assert "static_graph" in static

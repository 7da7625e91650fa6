"""HSDP x tensor parallelism: a Llama on 2 replicas x 2 shards x 2 tensor-parallel ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.harness.ranks import RankPool
from tests.models.compare import Comparison
from tests.models.sharded_llama import PARAMETERS
from ub_overlap.compiler.plan.reasons import collective_of

from .rank_hybrid_sharding import example, train
from .test_sharded_llama import MODEL, NORMS, SPLIT, TP, counts, skip_without_torchtitan

SMALL = "--device cpu --inner aot_eager --steps 2 --seq 16 --batch 1 --dim 64 --layers 1 --tp 2 --replicate 2"
REORDERED = "2 ranks 2 apart, then 2 ranks 4 apart"
REDUCED = {"backward reduce_scatter": PARAMETERS + 3, "backward all_reduce": PARAMETERS + NORMS}
"""Of each gradient over shards and replicas, and those of tensor parallelism."""


@pytest.fixture(scope="module")
def pool8() -> Iterator[RankPool]:
    with RankPool(8) as pool:
        yield pool


def trained(pool: RankPool, arguments: str) -> dict[str, Any]:
    """Run the example against the model of one process. Return the outcome of rank 0."""
    outcomes: list[dict[str, Any]] = pool.run(train, f"{SMALL} {arguments}".split())
    first = outcomes[0]
    assert [outcome["code"] for outcome in outcomes] == [0] * 8, first["output"]
    assert "the losses agree" in first["output"] and first["gradient_error"] < 1e-5, first["output"]
    assert [d["strategy"] for d in first["decisions"]] == [d["strategy"] for d in outcomes[-1]["decisions"]]
    return first


@pytest.mark.tier("full")
@pytest.mark.parametrize("scatter_first", [False, True])
def test_gathered_in_the_graph(pool8: RankPool, scatter_first: bool) -> None:
    """Losses, gradients, and collectives of all three groups: split, or fused where they are next to matmuls."""
    decisions = trained(pool8, "--scatter-first --overlap force" if scatter_first else "")["decisions"]
    found = Counter(f"{d['phase']} {collective_of(d['kind'])}" for d in decisions)
    assert {key: found[key] for key in REDUCED} == REDUCED, found
    assert found["forward all_gather"] == PARAMETERS + TP["forward all_gather"], found
    assert len({d["group"] for d in decisions if d["phase"] == "backward"}) == 3
    reordered = [d["reordered"] for d in decisions if d["reordered"]]
    strategies = Counter(d["strategy"].partition(":")[0] for d in decisions)
    if not scatter_first:
        assert not reordered and strategies.keys() == {"split"}, strategies
        return
    # DTensor of torch 2.13 itself scatters the gradients of tensor-parallel weights first, but not those of norms.
    assert len(reordered) >= NORMS and set(reordered) == {REORDERED}, reordered
    assert strategies["pipelined"] > 0, strategies
    assert all(d["reason"] for d in decisions if d["strategy"] == "none")


@pytest.mark.tier("full")
def test_fully_shard(pool8: RankPool) -> None:
    """FSDP2's HSDP over our transport, next to compiled blocks whose tensor parallelism is split."""
    outcome = trained(pool8, "--form fsdp2")
    found = Counter(f"{d['phase']} {d['kind']} {d['strategy']}" for d in outcome["decisions"])
    kinds = ("forward all_gather", "forward reduce_scatter", "backward all_gather", "backward reduce_scatter")
    assert found == {f"{kind} split": 2 for kind in kinds}, found
    steps = 2
    assert outcome["calls"] == {
        "/fsdp.all_gather": steps,
        "/fsdp.reduce_scatter": steps,
        "/fsdp.layers.0.all_gather": 2 * steps,
        "/fsdp.layers.0.reduce_scatter": steps,
    }


@pytest.mark.tier("full")
def test_torchtitan(pool8: RankPool) -> None:
    """SimpleFSDP's own code in mixed precision: all_reduces over replicas move behind reduce_scatters, all are split."""
    skip_without_torchtitan()
    variant = {"source": "torchtitan", "mode": "hybrid_shard", "tp": 2, "mixed": True}
    outcomes: list[Comparison] = pool8.run("tests.models.compare:compare", MODEL, variant, {**SPLIT, "scatter_first": True})
    for outcome in outcomes:
        outcome.check()
        assert {d["strategy"] for d in outcome.decisions} == {"split"}
        assert [d["reordered"] for d in outcome.decisions if d["reordered"]] == [REORDERED] * PARAMETERS
    found = counts(outcomes[0])
    assert found == {**TP, **REDUCED, "forward all_gather": PARAMETERS + TP["forward all_gather"]}, found


def test_copies_that_do_not_divide_the_ranks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(SystemExit, match="2"):
        example().parse(f"{SMALL} --replicate 3".split())
    assert "--replicate 3: expected a divisor of 4, the ranks that are not tensor parallel" in capsys.readouterr().err

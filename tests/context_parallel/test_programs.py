"""Programs with context parallelism: next to tensor parallelism, with FlexAttention, and torchtitan's Llama."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.context_parallel.rank_programs import (
    compare_flex_attention,
    compare_torchtitan,
    compare_with_tensor_parallelism,
)
from tests.harness.ranks import RankPool
from tests.harness.tiers import in_full
from ub_overlap.compiler.plan.plan import Plan
from ub_overlap.compiler.plan.strategy import Mode


def sites(plan: Plan) -> Counter[str]:
    """Return the number of sites by "kind strategy"."""
    return Counter(f"{d.kind.value} {str(d.strategy).partition(':')[0]}" for d in plan.decisions)


def check(results: list[tuple[float, list[Plan]]], *expected: dict[str, int]) -> None:
    """Check the numbers, and that all ranks have the same plans, with the sites `expected`."""
    for error, plans in results:
        assert error < 1e-5
        assert [sites(plan) for plan in plans] == list(expected)
    assert len({tuple(plan.shared_digest for plan in plans) for _, plans in results}) == 1


TENSOR_PARALLEL = {"all_gather_matmul pipelined": 2, "matmul_reduce_scatter pipelined": 2}
RING = ({"all_gather split": 2, "all_gather merged": 2}, {"all_to_all split": 4})
"""The sites of two layers in forward and backward."""


@pytest.mark.tier("full")
@pytest.mark.parametrize("load_balance", [True, False])
def test_a_ring_next_to_tensor_parallelism(pool4: RankPool, options: dict[str, Any], load_balance: bool) -> None:
    """Two ranks share a sequence, two the heads. The ranks' graphs differ, their plans agree."""
    results = pool4.run(compare_with_tensor_parallelism, "ring", options, load_balance, True)
    check(results, *({**TENSOR_PARALLEL, **exchange} for exchange in RING))


@pytest.mark.tier("full")
def test_gathers_next_to_tensor_parallelism(pool4: RankPool, options: dict[str, Any]) -> None:
    """In backward the weight gradients of tensor parallelism hide the exchange too, as independent matmuls of a bulk site."""
    results = pool4.run(compare_with_tensor_parallelism, "gathered", options, False, False)
    for error, plans in results:
        assert error < 1e-5
        exchange = [d for plan in plans for d in plan.decisions if d.kind.value in ("all_gather", "reduce_scatter")]
        assert len(exchange) >= 8 and all(d.overlapped for d in exchange)
    assert len({tuple(plan.shared_digest for plan in plans) for _, plans in results}) == 1


@pytest.mark.tier("full")
def test_heads_next_to_tensor_parallelism(pool4: RankPool, options: dict[str, Any]) -> None:
    """Ulysses exchanges the heads that tensor parallelism leaves to a rank."""
    results = pool4.run(compare_with_tensor_parallelism, "ulysses", options, False, True)
    for error, plans in results:
        assert error < 1e-5
        for plan in plans:
            assert sites(plan).items() >= TENSOR_PARALLEL.items()
            assert sum(d.kind.value == "all_to_all" for d in plan.decisions) == 8
    assert len({tuple(plan.shared_digest for plan in plans) for _, plans in results}) == 1


@pytest.mark.parametrize("load_balance", [True, in_full(False)])
def test_flex_attention(pool2: RankPool, options: dict[str, Any], load_balance: bool) -> None:
    """torch's op is replaced; gathers of keys and values, and reduce_scatters of their gradients, are split."""
    results = pool2.run(compare_flex_attention, options, load_balance)
    check(results, {"all_gather split": 2}, {"reduce_scatter split": 2})


@pytest.mark.tier("full")
@pytest.mark.parametrize("load_balance", [True, False])
def test_torchtitan(pool2: RankPool, options: dict[str, Any], load_balance: bool) -> None:
    results = pool2.run(compare_torchtitan, options, load_balance, 1)
    check(results, *RING)


@pytest.mark.tier("full")
def test_torchtitan_next_to_tensor_parallelism(pool4: RankPool, options: dict[str, Any]) -> None:
    """All its sites are overlapped: those of the embedding and the head are split, or hidden behind other matmuls."""
    results = pool4.run(compare_torchtitan, options, True, 2)
    for error, plans in results:
        assert error < 1e-5
        assert all(sites(plan).items() >= exchange.items() for plan, exchange in zip(plans, RING, strict=True))
        assert all(d.overlapped or d.strategy.mode is Mode.MERGED for plan in plans for d in plan.decisions)
    assert len({tuple(plan.shared_digest for plan in plans) for _, plans in results}) == 1

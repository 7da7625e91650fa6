"""torch's ring attention: what the next step needs travels while the present one computes, with one plan on all ranks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.context_parallel import rank_own_ring
from tests.context_parallel.rank_attention import compare_forms
from tests.context_parallel.test_gathered import strategies
from tests.harness.ranks import RankPool
from tests.harness.tiers import full_but
from ub_overlap.compiler.plan.plan import Plan
from ub_overlap.compiler.plan.strategy import Mode


def counts(plans: list[Plan]) -> list[dict[str, int]]:
    """Return the number of sites by "kind strategy", by graph."""
    return [dict(Counter(graph)) for graph in strategies(plans)]


CAUSAL, BALANCED = (True, False), (True, True)


@pytest.mark.tier("full")
@pytest.mark.parametrize(("causal", "load_balance"), [CAUSAL, BALANCED, (False, False)])
def test_a_ring_that_gathers(pool2: RankPool, options: dict[str, Any], causal: bool, load_balance: bool) -> None:
    """Keys and values are gathered once. They arrive while the attention to the own positions runs, and backward reads them."""
    results = pool2.run(compare_forms, "sdpa", options, "allgather", load_balance, causal)
    for error, plans in results:
        assert error < 1e-5
        assert counts(plans) == [{"all_gather split": 2, "all_gather merged": 2}, {"all_to_all split": 4}]
        split = [d for d in plans[0].decisions if d.strategy.mode is Mode.SPLIT]
        assert all(d.window is not None and d.window.hidden == 1.0 for d in split)
    assert [plan.shared_digest for plan in results[0][1]] == [plan.shared_digest for plan in results[1][1]]


@pytest.mark.parametrize(("causal", "load_balance"), full_but([BALANCED], [CAUSAL, BALANCED]))
def test_a_ring_that_rotates(pool2: RankPool, options: dict[str, Any], causal: bool, load_balance: bool) -> None:
    """Keys and values, and in backward their gradients, travel to the next rank while the attention of a step runs."""
    results = pool2.run(compare_forms, "sdpa", options, "alltoall", load_balance, causal)
    for error, plans in results:
        assert error < 1e-5
        assert counts(plans) == [{"all_to_all split": 2, "all_to_all merged": 2}, {"all_to_all split": 4}]
    assert [plan.shared_digest for plan in results[0][1]] == [plan.shared_digest for plan in results[1][1]]


@pytest.mark.tier("full")
def test_four_ranks_that_gather(pool4: RankPool, options: dict[str, Any]) -> None:
    """Without load balance the ranks compute 1 to 4 steps of the ring, by one plan. A gradient travels through them all."""
    results = pool4.run(compare_forms, "sdpa", options, "allgather", False, True)
    for error, plans in results:
        assert error < 1e-5
        assert counts(plans) == [{"all_gather split": 2, "all_gather merged": 2}, {"all_to_all split": 8}]
        slots = [d.window.slot for d in plans[1].decisions if d.window is not None]
        assert slots == [0, 1, 2, 3] * 2
    assert len({tuple(plan.shared_digest for plan in plans) for _, plans in results}) == 1


@pytest.mark.tier("full")
@pytest.mark.parametrize(
    ("load_balance", "checkpointed"),
    [(False, False), (True, False), (True, True)],
    ids=["causal", "balanced", "checkpointed"],
)
def test_four_ranks_that_rotate(pool4: RankPool, options: dict[str, Any], load_balance: bool, checkpointed: bool) -> None:
    """Backward of a layer reads what the 3 exchanges of forward received, and sends 4 gradients.

    A user's checkpoint keeps no keys and values of other ranks: backward exchanges them again, once.
    """
    results = pool4.run(compare_forms, "sdpa", options, "alltoall", load_balance, True, checkpointed=checkpointed)
    for error, plans in results:
        assert error < 1e-5
        forward, backward = counts(plans)
        assert forward == {"all_to_all split": 2 * 3, "all_to_all merged": 2 * 3}
        assert backward["all_to_all split"] == 2 * (3 + 4 if checkpointed else 4)
        details = {d.detail for d in plans[0].decisions if d.strategy.mode is Mode.MERGED}
        assert details == {f"backward reads the result of forward.{i}" for i in range(2 * 3)}
    assert len({tuple(plan.shared_digest for plan in plans) for _, plans in results}) == 1


@pytest.mark.tier("full")
@pytest.mark.parametrize("rotation", ["allgather", "alltoall"])
def test_grouped_heads(pool4: RankPool, options: dict[str, Any], rotation: str) -> None:
    """Each key and value is repeated for 2 query heads. All messages are half as large, with one plan on all ranks.

    Ranks skip steps. So they add up other gradients, and all of them send sums of two heads.
    """
    whole, half = (pool4.run(compare_forms, "sdpa", options, rotation, False, True, kv_heads=kv_heads) for kv_heads in (0, 2))
    for (_, before), (error, plans) in zip(whole, half, strict=True):
        assert error < 1e-5
        assert counts(plans) == counts(before)
        sent = [[d.bytes for d in plan.decisions if d.bytes is not None] for plan in plans]
        assert [[2 * n for n in graph] for graph in sent] == [[d.bytes for d in p.decisions if d.bytes] for p in before]
        assert all(d.saved_bytes == d.bytes for plan in plans for d in plan.decisions if d.bytes is not None)
        hidden, hidden_before = ([[bool(d.paired) for d in p.decisions if d.bytes] for p in of] for of in (plans, before))
        assert hidden == hidden_before and any(map(any, hidden))  # repeated heads are read where whole ones are
    assert len({tuple(plan.shared_digest for plan in plans) for _, plans in half}) == 1


def test_a_ring_whose_ranks_read_other_gradients(pool2: RankPool, options: dict[str, Any]) -> None:
    """Gradients are summed in front of a message by what reads them, so such ranks disagree. They say so before any is sent.

    Messages below `min_bytes` are left alone, and as traced the program runs.
    """
    for arguments in ((options, False), ({"inner": "aot_eager", "min_bytes": 1 << 20}, True)):
        for found in pool2.run(rank_own_ring.train, *arguments):
            assert found["error"] == "" and found["same"], found
    for found in pool2.run(rank_own_ring.train, options, True):
        assert found["error"] in ("PlanMismatchError", "ShapeMismatchError"), found


@pytest.mark.tier("full")
def test_a_checkpoint_without_load_balance(pool4: RankPool, options: dict[str, Any]) -> None:
    """Backward repeats the exchanges of the steps that a rank computes, and ranks compute different numbers of steps. Their
    plans differ, and they say so instead of waiting."""
    for error in pool4.run(rank_own_ring.checkpointed, options):
        assert error == "PlanMismatchError", error


@pytest.mark.tier("full")
def test_a_ring_that_is_not_merged(pool4: RankPool, options: dict[str, Any]) -> None:
    """Without merged exchanges ranks send other numbers of messages where they skip steps. They say so instead of waiting."""
    for error in pool4.run(rank_own_ring.not_merged, options):
        assert error in ("PlanMismatchError", "ShapeMismatchError"), error

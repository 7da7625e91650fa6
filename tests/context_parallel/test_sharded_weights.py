"""Context parallelism and sharded weights in one graph: both kinds of collectives are split, by one plan on all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest

from tests.context_parallel import machine
from tests.context_parallel.rank_sharded_weights import LAYERS, MATRICES, NORMS, compare_with_sharded_weights
from tests.harness.ranks import RankPool
from tests.harness.tiers import in_full
from ub_overlap.compiler.plan.decision import Decision
from ub_overlap.compiler.plan.plan import Plan
from ub_overlap.compiler.plan.reasons import collective_of
from ub_overlap.compiler.plan.strategy import Mode

pytestmark = pytest.mark.tier("test")

WEIGHTS = NORMS + MATRICES
Results = list[tuple[float, float, list[Plan]]]


@dataclass(frozen=True)
class Exchange:
    """The exchange of one layer between two ranks. `exposed`: all_to_alls that nothing hides, in forward and backward."""

    forward: dict[str, int]
    backward: dict[str, int]
    exposed: tuple[int, int] = (0, 0)


GATHERED = Exchange({"all_gather": 2}, {"reduce_scatter": 2})
ULYSSES = Exchange({"all_to_all": 4}, {"all_to_all": 4}, exposed=(2, 1))
RINGS = {
    "allgather": Exchange({"all_gather": 1}, {"all_to_all": 2}),
    "alltoall": Exchange({"all_to_all": 1}, {"all_to_all": 2}),
}
NOT_SPLIT = 3
"""Weights of one graph at most that are fused with a matmul, or that nothing hides: the first gathers, the last reductions."""


def count(decisions: Iterable[Decision]) -> Counter[str]:
    return Counter(collective_of(d.kind.value) for d in decisions)


def check(results: Results, exchange: Exchange, layers: int = LAYERS, gathered_again: int = 0) -> None:
    """Check the numbers, that all ranks have the same plans, and that both kinds of collectives are split.

    `gathered_again`: weights of a layer that backward gathers.
    """
    weights = {"all_gather": WEIGHTS}, {"reduce_scatter": WEIGHTS, "all_gather": gathered_again}
    for from_whole, from_plain, plans in results:
        assert from_whole < 1e-5 and from_plain < 1e-6
        own = zip(plans, (exchange.forward, exchange.backward), weights, exchange.exposed, strict=True)
        for plan, exchanged, of_weights, exposed in own:
            in_layer = Counter(exchanged) + Counter(of_weights)
            sites = [d for d in plan.decisions if d.strategy.mode is not Mode.MERGED]
            assert count(sites) == Counter({name: layers * n for name, n in in_layer.items()})
            split = [d for d in sites if str(d.strategy) == "split"]
            left = [d for d in sites if d not in split]
            rows = [f"{d.id} {d.kind.value} {d.strategy} {d.reason} {d.detail}" for d in left]
            assert len(left) <= layers * exposed + NOT_SPLIT, rows
            if len({d.ranks for d in sites}) == 2:
                assert count(d for d in split if d.ranks == 2).total() == layers * (sum(exchanged.values()) - exposed), rows
            elif exchange is not ULYSSES:
                assert all(d.overlapped for d in left), rows
    assert len({tuple(plan.shared_digest for plan in plans) for _, _, plans in results}) == 1


@pytest.mark.parametrize(
    ("form", "exchange"), [in_full(("gathered", GATHERED)), ("flex_op", GATHERED), in_full(("ulysses", ULYSSES))]
)
def test_one_group(pool2: RankPool, options: dict[str, Any], form: str, exchange: Exchange) -> None:
    """Weights are sharded over the ranks that share a sequence."""
    check(pool2.run(compare_with_sharded_weights, form, options), exchange)


@pytest.mark.tier("full")
@pytest.mark.parametrize(("rotation", "load_balance"), [("allgather", True), ("allgather", False), ("alltoall", True)])
def test_a_ring_in_one_group(pool2: RankPool, options: dict[str, Any], rotation: str, load_balance: bool) -> None:
    """Slots of the ring are given by order, those of weights by what is free. The graphs of ranks differ, their plans agree."""
    check(pool2.run(compare_with_sharded_weights, "ring", options, rotation, load_balance), RINGS[rotation])


@pytest.mark.tier("full")
@pytest.mark.parametrize(
    ("form", "rotation", "exchange"),
    [
        ("gathered", "", GATHERED),
        ("ulysses", "", ULYSSES),
        ("ring", "allgather", RINGS["allgather"]),
        ("ring", "alltoall", RINGS["alltoall"]),
    ],
)
def test_two_replicas(pool4: RankPool, options: dict[str, Any], form: str, rotation: str, exchange: Exchange) -> None:
    """Two ranks share a sequence, and weights are sharded over all four."""
    results = pool4.run(compare_with_sharded_weights, form, options, rotation, replicas=2, layers=1)
    check(results, exchange, layers=1)


@pytest.mark.tier("full")
@pytest.mark.parametrize(("form", "rotation", "exchange"), [("flex_op", "", GATHERED), ("ring", "alltoall", RINGS["alltoall"])])
def test_gathered_again(pool2: RankPool, options: dict[str, Any], form: str, rotation: str, exchange: Exchange) -> None:
    """With a budget of 0 backward gathers the weights of its matmuls again, but exchanges no keys and values again."""
    budget = {**options, "memory_budget": 0}
    results = pool2.run(compare_with_sharded_weights, form, budget, rotation, layers=1)
    check(results, exchange, layers=1, gathered_again=MATRICES)


@pytest.mark.tier("full")
def test_gathered_again_by_two_replicas(pool4: RankPool, options: dict[str, Any]) -> None:
    budget = {**options, "memory_budget": 0}
    results = pool4.run(compare_with_sharded_weights, "ring", budget, "allgather", replicas=2, layers=1)
    check(results, RINGS["allgather"], layers=1, gathered_again=MATRICES)


@pytest.mark.tier("full")
def test_inductor(pool2: RankPool, options: dict[str, Any]) -> None:
    results = pool2.run(compare_with_sharded_weights, "gathered", {**options, "inner": "inductor"}, layers=1)
    check(results, GATHERED, layers=1)


@pytest.mark.tier("full")
def test_four_ranks_of_a_balanced_ring(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """With little landing memory, weights are split or hidden behind other matmuls, by one plan on all ranks."""
    monkeypatch.setattr(machine, "SLOWER_COMPUTE", 27157)
    monkeypatch.setattr(machine, "SLOWER_LINK", 7.4)
    scarce = {**options, "profile": machine.slow_profile(), "split_bytes": 100_000}
    with RankPool(4) as pool:  # ranks that disagree cannot use the group again
        results = pool.run(compare_with_sharded_weights, "ring", scarce, "allgather", layers=1, positions=256)
    assert len({tuple(plan.shared_digest for plan in plans) for _, _, plans in results}) == 1

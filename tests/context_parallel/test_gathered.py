"""All-gathered keys and values: gathers behind the q projection, reduce_scatters of their gradients behind weight gradients."""

from __future__ import annotations

from typing import Any

import pytest

from tests.context_parallel.rank_attention import compare_forms
from tests.harness.ranks import RankPool
from tests.harness.tiers import full_but
from ub_overlap.compiler.plan.plan import Plan


def strategies(plans: list[Plan]) -> list[list[str]]:
    """Return "kind strategy" of each site, by graph."""
    return [[f"{d.kind.value} {d.strategy}" for d in plan.decisions] for plan in plans]


@pytest.mark.parametrize("form", full_but(["gathered"], ["gathered", "flex_op"]))
def test_gathers_are_split(pool2: RankPool, options: dict[str, Any], form: str) -> None:
    """Results equal those of the whole sequence, and each exchange of both layers starts early and finishes late."""
    results = pool2.run(compare_forms, form, options)
    for error, plans in results:
        assert error < 1e-5
        assert strategies(plans) == [["all_gather split"] * 4, ["reduce_scatter split"] * 4]
        for decision in (d for plan in plans for d in plan.decisions):
            assert decision.window is not None and decision.window.hidden == 1.0, decision.detail
    assert [plan.shared_digest for plan in results[0][1]] == [plan.shared_digest for plan in results[1][1]]


@pytest.mark.tier("full")
@pytest.mark.parametrize("form", ["gathered", "flex_op"])
def test_four_ranks(pool4: RankPool, options: dict[str, Any], form: str) -> None:
    """Gradients of 4 ranks are added up in another order than gloo's: close to eager results, not of the same bits."""
    results = pool4.run(compare_forms, form, options)
    for error, plans in results:
        assert error < 1e-5
        assert strategies(plans) == [["all_gather split"] * 4, ["reduce_scatter split"] * 4]
    assert len({tuple(plan.shared_digest for plan in plans) for _, plans in results}) == 1

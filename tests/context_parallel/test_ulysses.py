"""Ulysses: all_to_alls of heads behind the projections, and of their gradients behind weight gradients."""

from __future__ import annotations

from typing import Any

import pytest

from tests.context_parallel.rank_attention import compare_forms
from tests.harness.ranks import RankPool


def test_heads_are_exchanged_behind_projections(pool2: RankPool, options: dict[str, Any]) -> None:
    """q's runs behind the k projection, k's behind the v projection; nothing hides v's and the result's, and they say so.

    In backward weight gradients hide three of four.
    """
    results = pool2.run(compare_forms, "ulysses", options, causal=True)
    for error, plans in results:
        assert error < 1e-5
        forward, backward = ([str(d.strategy) for d in plan.decisions] for plan in plans)
        assert [d.kind.value for plan in plans for d in plan.decisions] == ["all_to_all"] * 16
        assert forward == ["split", "split", "none", "none"] * 2 and backward == ["split", "none", "split", "split"] * 2
        for decision in (d for plan in plans for d in plan.decisions):
            if decision.window is None:
                assert decision.reason is not None and decision.reason.value == "no_gain"
            else:
                assert decision.window.hidden == 1.0
    assert [plan.shared_digest for plan in results[0][1]] == [plan.shared_digest for plan in results[1][1]]


@pytest.mark.tier("full")
def test_four_ranks(pool4: RankPool, options: dict[str, Any]) -> None:
    """An exchange adds up nothing, so compiled results have the bits of eager ones on any number of ranks."""
    results = pool4.run(compare_forms, "ulysses", options, causal=True)
    for error, plans in results:
        assert error < 1e-5
        assert [d.kind.value for plan in plans for d in plan.decisions] == ["all_to_all"] * 16
        assert any(d.overlapped for plan in plans for d in plan.decisions)
    assert len({tuple(plan.shared_digest for plan in plans) for _, plans in results}) == 1

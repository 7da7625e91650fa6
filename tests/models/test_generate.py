"""Greedy generation of a transformers Llama over 2 CPU ranks gives the same tokens with our backend as without."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness.ranks import RankPool
from tests.models import rank_generate

pytestmark = pytest.mark.tier("test")

ALL_REDUCES = 5
"""Of a graph: the embedding's and two of each of the two layers. Each has a norm behind it; the logits are gathered."""


@pytest.mark.tier("full")
def test_tokens_are_the_same() -> None:
    """With a static cache the decode step is a graph, with a dynamic one the prompt too, and the lengths are symbols."""
    pytest.importorskip("transformers")
    options: dict[str, Any] = {"profile": "h200", "inner": "aot_eager"}
    with RankPool(2) as pool:  # ranks of their own: torchtitan cannot be imported after transformers
        outcomes = pool.run(rank_generate.run, {"static": 3, "dynamic": 2}, 6, options, timeout=350)
    for found in outcomes:
        for cache, run in found.items():
            assert run["tokens"] == run["expected"] == outcomes[0][cache]["expected"], cache
            assert len({tuple(row) for row in run["tokens"]}) > 1, "all prompts go on alike"
            assert len(run["graphs"]) >= (1 if cache == "static" else 2), cache
            assert max(run["groups"]) == 4, "q, k, v and gate, up of two layers are one matmul each"
            for graph in run["graphs"]:
                *sums, (kind, gathered, _) = graph
                assert (kind, gathered) == ("all_gather", "none") and len(sums) == ALL_REDUCES, graph
                for _, strategy, detail in sums:
                    assert strategy.rpartition(";")[2] in ("one_shot", "*=none") and "one_shot" in strategy, graph
                    assert "RMSNorm" in detail and "one_shot saves" in detail, detail

"""transformers' Llama under fully_shard with our collectives on 2 CPU ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.ranks import RankPool

from . import rank_hf

pytestmark = pytest.mark.tier("test")


@pytest.mark.parametrize("way", ["by name", "enabled"])
def test_llama_trains_as_one_process(way: str, tmp_path: Path) -> None:
    """Accumulation, clipping and a checkpoint; each layer is compiled, and gathered and reduced by us."""
    pytest.importorskip("transformers")
    with RankPool(2) as pool:  # ranks of their own: torchtitan cannot be imported after transformers
        outcomes = pool.run(rank_hf.trains_as_one_process, str(tmp_path / "checkpoint"), way)
    expected = outcomes[0][1]
    means = [sum(pair) / 2 for pair in zip(*(own for own, *_ in outcomes), strict=True)]
    assert means == pytest.approx(expected, abs=1e-4) and expected[-1] < expected[0]
    for _, _, worst, calls in outcomes:
        assert worst < 2e-3, worst
        assert len(calls) == 4 and set(calls.values()) == {"shared memory"}, calls

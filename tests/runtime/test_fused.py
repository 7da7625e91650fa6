"""fused_collective on the CPU executor: results, misuse, and ranks that fail."""

from __future__ import annotations

import pytest

from tests.harness.outcomes import observe_ranks
from tests.harness.ranks import RankPool
from tests.harness.tiers import full_but

from . import rank_fused

pytestmark = pytest.mark.tier("test")

STEP = 2.5
SLACK = 20.0
MISUSES = (
    "this strategy is unknown",
    "two_shot is a strategy of all_reduces",
    "this norm is unknown",
    "without the norm it has no weight and no bias",
    "the weight of the branch's norm does not fit",
    "without the branch's norm it has no weight and no bias",
    "the linear bias has another dtype than the input",
    "the linear bias is no vector",
    "the addend does not fit",
    "without a norm there is no scale",
    "an all_gather has no epilogue",
    "an all_gather has no epilogue",
    "the weight of the norm does not fit",
    "the residual has another dtype than the input",
    "rows are no multiple of 16 bytes",
    "rows are too long for an epilogue",
    "the normed rows keep the input's dtype",
    "rows have scales of their own, and the tensor has one too",
    "the scale of a row of zeros would be 0",
)
"""What the errors of rank_fused.misuse say, in order."""


@pytest.mark.parametrize(("world", "times"), [(2, 150), (4, 50)])
def test_any_order_with_delays(pools: dict[int, RankPool], world: int, times: int) -> None:
    assert pools[world].run(rank_fused.random_program, times, 200, world) == [[]] * world


@pytest.mark.parametrize("world", [2, 4])
def test_close_to_float64(pools: dict[int, RankPool], world: int) -> None:
    assert pools[world].run(rank_fused.close_to_float64) == [[]] * world


@pytest.mark.parametrize("strategy", ["one_shot", "none"])
def test_casts_are_close_to_float64(pools: dict[int, RankPool], strategy: str) -> None:
    assert pools[2].run(rank_fused.casts_close_to_float64, strategy) == [[]] * 2


def test_an_abort_names_the_fused_collective_that_waits(pools: dict[int, RankPool]) -> None:
    own, theirs = pools[2].run(rank_fused.aborted)
    assert (own["error"], theirs["error"]) == ("GroupAbortedError", "PeerFailedError"), (own, theirs)
    assert all("fused_collective at site '/waits'" in found["text"] for found in (own, theirs)), (own, theirs)


def test_misuse_is_named_and_harmless(pools: dict[int, RankPool]) -> None:
    for found in pools[2].run(rank_fused.misuse):
        assert [one["error"] for one in found] == ["OptionError"] * len(MISUSES) + [""], found
        for one, what in zip(found, MISUSES, strict=False):
            assert what in one["text"]


@pytest.mark.parametrize("strategy", full_but(["two_shot"], ["one_shot", "two_shot"]))
def test_a_skipped_call_names_the_rank(pools: dict[int, RankPool], strategy: str) -> None:
    for found in pools[4].run(rank_fused.skipped, strategy, STEP)[:3]:
        assert (found["error"], found["ranks"]) == ("PeerTimeoutError", (3,)), found
        assert "fused_collective at site '/fused', phase READY" in found["text"]
        assert STEP * 0.9 < found["seconds"] < STEP + SLACK


@pytest.mark.parametrize("strategy", ["one_shot", "two_shot"])
def test_another_site_is_a_mismatch(pools: dict[int, RankPool], strategy: str) -> None:
    for found in pools[2].run(rank_fused.other_site, strategy):
        assert found["error"] == "SiteMismatchError", found
        assert "/order.0" in found["text"]
        assert "/order.1" in found["text"]
        assert found["seconds"] < 25, "a mismatch needs no deadline"


def test_a_rank_that_dies() -> None:
    found = observe_ranks("tests.runtime.rank_fused:dies", 2, args=(60.0,))[0].value
    assert (found["error"], found["ranks"]) == ("PeerTimeoutError", (1,)), found
    assert found["seconds"] < SLACK


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter", "all_reduce"])
def test_fakes(pools: dict[int, RankPool], collective: str) -> None:
    assert pools[2].run(rank_fused.fake_sizes, collective) == [[]] * 2


def test_a_table_picks_by_rows(pools: dict[int, RankPool]) -> None:
    assert pools[2].run(rank_fused.by_size) == [["one_shot", "two_shot"]] * 2

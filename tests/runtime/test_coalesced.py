"""Split collectives of several tensors on the CPU executor and over c10d: equal in bits to those of one, and misuse."""

from __future__ import annotations

import pytest

from tests.harness.ranks import RankPool

from . import rank_coalesced


@pytest.mark.parametrize(("world", "times", "strategy"), [(2, 120, "bulk"), (3, 60, "bulk"), (2, 40, "none")])
def test_bits_equal_those_of_single_tensors(pools: dict[int, RankPool], world: int, times: int, strategy: str) -> None:
    assert pools[world].run(rank_coalesced.equals_single, times, strategy) == [[]] * world


def test_results_in_landing_memory(pools: dict[int, RankPool]) -> None:
    """A slot that was not released is free once all results are."""
    for found in pools[2].run(rank_coalesced.in_landing_memory):
        assert found == {
            "same memory": True, "apart": True, "right": [True, True], "again": "OptionError", "one is kept": "OptionError",
            "abandoned": True, "copies": True, "reduced": "OptionError",
        }  # fmt: skip


@pytest.mark.parametrize("what", ["handles", "fakes"])
def test_lists(pools: dict[int, RankPool], what: str) -> None:
    assert pools[2].run(getattr(rank_coalesced, what)) == [[], []]


def test_misuse_is_named_and_harmless(pools: dict[int, RankPool]) -> None:
    for found in pools[2].run(rank_coalesced.misuse):
        assert [one["error"] for one in found] == ["OptionError"] * 7 + [""], found
        texts = [one["text"] for one in found[:7]]
        assert all("holds another collective than the one to finish" in text for text in texts[:3]), texts
        assert "not every tensor has an out_dtype" in texts[3]
        assert "cannot be scattered evenly" in texts[4]
        assert "an empty list" in texts[5] and "cannot be summed" in texts[6]


def test_empty_tensors_in_slots_without_memory(pools: dict[int, RankPool]) -> None:
    sizes = {"all_gather": 8, "reduce_scatter": 2, "all_reduce": 4}
    want = [[(0, 3), (rows, 0), (0, 3)] for rows in sizes.values()]
    assert pools[2].run(rank_coalesced.empty_tensors) == [want, want]


def test_ranks_with_other_sizes(pools: dict[int, RankPool]) -> None:
    """Look-alike: as many bytes on all ranks, but tensors of other sizes."""
    for found in pools[2].run(rank_coalesced.other_sizes):
        assert found["error"] == "ShapeMismatchError" and "[4, 2]" in found["text"] and "[2, 2]" in found["text"], found

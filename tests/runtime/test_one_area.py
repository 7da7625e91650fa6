"""all_to_all with one landing area: steps of a ring, bit by bit, next to pieces of any size in the same slots; misuse."""

from __future__ import annotations

import pytest

from tests.harness.ranks import RankPool

from . import rank_one_area as work


@pytest.mark.parametrize(("world", "times"), [(2, 12), (3, 12), (4, 8)])
def test_random_permutations(pools: dict[int, RankPool], world: int, times: int) -> None:
    assert pools[world].run(work.random_permutations, times) == [[]] * world


def test_the_next_source_waits_for_a_late_reader(pools: dict[int, RankPool]) -> None:
    assert pools[3].run(work.late_reader) == [[]] * 3


@pytest.mark.parametrize("world", [2, 4])
def test_memory(pools: dict[int, RankPool], world: int) -> None:
    """A step needs as much landing memory as it has bytes, not that for each rank."""
    for found in pools[world].run(work.memory):
        assert found == {"True": 2 << 20, "False": world * (2 << 20)}


def test_memory_of_a_slot_that_others_share(pools: dict[int, RankPool]) -> None:
    """The large step fits as it is, whichever call opens the window that decides on growth."""
    for found in pools[4].run(work.shared_slot):
        assert set(found[1:]) == {4 << 20}, found


@pytest.mark.parametrize("strategy", ["bulk", "none"])
def test_misuse_is_named_and_harmless(pools: dict[int, RankPool], strategy: str) -> None:
    for found in pools[3].run(work.misuse, strategy):
        assert [one["error"] for one in found] == ["OptionError", "OptionError", ""], found
        assert "input_splits has rows for several peers" in found[0]["text"] or "output_splits" in found[0]["text"]
        assert "output_splits has rows for several peers, but one_area" in found[1]["text"]
        assert "one_area=False" in found[1]["text"]


def test_ranks_that_disagree(pools: dict[int, RankPool]) -> None:
    """An error names the argument, before anything is sent."""
    for found in pools[3].run(work.disagrees):
        assert found["error"] and "one_area" in found["text"], found

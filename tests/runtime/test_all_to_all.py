"""start_all_to_all and finish_all_to_all on the CPU: pieces of any size bit by bit, misuse, graphs with unbacked splits."""

from __future__ import annotations

import pytest

from tests.harness.ranks import RankPool

from . import rank_all_to_all as work

MISUSE = [
    "output_splits has not one number per rank",
    "input_splits has a negative number",
    "input_splits do not sum up to the rows of the input",
    "a tensor without dims cannot be exchanged",
    "there is no such split slot",
    "an all_to_all has no such strategy",
    "split slot 0 has no open collective",
    "split slot 0 is in use by an open collective",
    "split slot 0 holds another collective than the one to finish",
    "the function has no gradient",
    "dim 0 cannot be divided evenly",
]


@pytest.mark.parametrize("strategy", ["bulk", "none"])
@pytest.mark.parametrize("world", [2, 3])
def test_values(pools: dict[int, RankPool], world: int, strategy: str) -> None:
    assert pools[world].run(work.values, strategy, timeout=60) == [[]] * world


@pytest.mark.parametrize("strategy", ["bulk", "none"])
def test_any_order(pools: dict[int, RankPool], strategy: str) -> None:
    assert pools[3].run(work.random_program, 60, 5, strategy, timeout=60) == [[]] * 3


def test_handles(pools: dict[int, RankPool]) -> None:
    assert pools[2].run(work.handles, timeout=60) == [[], []]


@pytest.mark.parametrize("strategy", ["bulk", "none"])
def test_misuse_is_named_and_harmless(pools: dict[int, RankPool], strategy: str) -> None:
    for found in pools[2].run(work.misuse, strategy, timeout=60):
        assert [one["error"] for one in found] == ["OptionError"] * len(MISUSE) + [""], found
        assert [text for text, one in zip(MISUSE, found, strict=False) if text not in one["text"]] == []


def test_across_hosts(pools: dict[int, RankPool]) -> None:
    assert pools[2].run(work.in_order, "values", "bulk", timeout=60) == [[], []]


def test_fakes_with_unbacked_splits(pools: dict[int, RankPool]) -> None:
    assert pools[2].run(work.unbacked_fakes, timeout=30) == [("sum", 3, "torch.bfloat16")] * 2


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_in_a_graph(pools: dict[int, RankPool], inner: str) -> None:
    assert pools[2].run(work.compiled, inner, timeout=200) == [[], []]

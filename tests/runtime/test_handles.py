"""Collectives of eager code that return a handle: values, what may run in between, misuse, late ranks."""

from __future__ import annotations

import re

import pytest

from tests.harness.ranks import RankPool

from . import rank_handles as work


@pytest.mark.parametrize("what", ["values", "in_between"])
def test_values(pools: dict[int, RankPool], what: str) -> None:
    for bad in pools[2].run(getattr(work, what)):
        assert not bad, "\n".join(bad)


def test_misuse(pools: dict[int, RankPool]) -> None:
    expected = ["has no gradient", "has no dims", "cannot be summed", "reduce_op is unknown", "cannot be scattered evenly"]
    for texts in pools[2].run(work.misuse):
        assert all(text.startswith("OptionError") for text in texts), texts
        assert [e for e, text in zip(expected, texts, strict=False) if e not in text] == []
        assert "4 collectives of the group are open" in texts[-1] and "at site '/one more'" in texts[-1]
        assert re.search(r"all_gather at site '/h0', started by \S*rank_handles.py:\d+;", texts[-1]), texts[-1]


def test_dropped_handles_give_their_slots_back(pools: dict[int, RankPool]) -> None:
    """The start that needs a slot finishes the oldest dropped one. It cannot while the oldest of all has a handle."""
    for found in pools[2].run(work.dropped):
        text = found["text"]
        assert found["error"] == "OptionError" and "4 collectives of the group are open" in text, found
        held, *later = re.findall(r"(\w+) at site '/(\w+)', started by \S*rank_handles.py:\d+([^;\n]*)", text)
        assert held == ("all_gather", "held", "")
        assert later == [("reduce_scatter", f"later{i}", ", and dropped without wait()") for i in range(1, 4)]


def test_a_group_closed_while_a_push_waits(pools: dict[int, RankPool]) -> None:
    assert pools[2].run(work.closed_while_open)[0] < 10


def test_a_rank_that_never_starts(pools: dict[int, RankPool]) -> None:
    found = pools[2].run(work.late_peer, 2.0)[0]
    assert (found["error"], found["ranks"]) == ("PeerTimeoutError", (1,)), found
    assert "split all_gather at site '/late'" in found["text"]


def test_the_start_does_not_wait(pools: dict[int, RankPool]) -> None:
    started, waited = pools[2].run(work.returns_early, 1.5)[0]
    assert started < 1.0 < waited

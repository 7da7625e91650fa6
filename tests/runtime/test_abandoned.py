"""Exceptions between the start and the finish of a split collective: the slot is used again, or all ranks get a named error."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness.ranks import RankPool
from tests.harness.tiers import full_but

from . import rank_abandoned as work

STEP = 3.0


@pytest.mark.parametrize("strategy", ["bulk", "none"])
def test_all_ranks_leave(pools: dict[int, RankPool], strategy: str) -> None:
    """The next start of the slot ends what was left. Results and other calls are right."""
    assert pools[2].run(work.all_leave, strategy) == [[], []]


@pytest.mark.parametrize("collective", full_but(["all_reduce"], ["all_gather", "reduce_scatter", "all_reduce"]))
@pytest.mark.parametrize("strategy", ["bulk", "none"])
def test_one_rank_leaves(pools: dict[int, RankPool], collective: str, strategy: str) -> None:
    """The look-alike: the others have finished. No rank goes on with data of another step: all get an error with the site."""
    finished, left = pools[2].run(work.one_leaves, collective, strategy, STEP)
    check_one_left(finished, left, f"split {collective}")
    assert "at site '/split.0'" in finished["text"]


def check_one_left(finished: dict[str, Any], left: dict[str, Any], what: str) -> None:
    """`finished`, `left`: the errors of rank 0, and of rank 1, which has left the collective alone."""
    assert (left["error"], left["ranks"]) == ("SiteMismatchError", (0,)), left
    assert f"{what} was started and not finished on rank 1" in left["text"] and "and not so on rank 0" in left["text"], left
    assert finished["error"] in ("PeerTimeoutError", "PeerFailedError", "CollectiveError"), finished
    assert finished["ranks"] == ((1,) if finished["error"] != "CollectiveError" else ()), finished
    assert max(finished["seconds"], left["seconds"]) < 3 * STEP + 20


@pytest.mark.parametrize("strategy", ["bulk", "none"])
def test_an_exception_that_lives_on_holds_the_slot(pools: dict[int, RankPool], strategy: str) -> None:
    """Then the start is refused with the fix. Once only a cycle holds the exception, the slot is free again."""
    first, last = pools[2].run(work.one_holds_its_exception, strategy)
    assert first["good"] and last["good"]
    assert last["error"] == "OptionError" and "drop the exception" in last["text"], last


@pytest.mark.parametrize("strategy", ["bulk", "none"])
def test_ranks_that_leave_different_collectives(pools: dict[int, RankPool], strategy: str) -> None:
    for rank, found in enumerate(pools[2].run(work.others_left, strategy)):
        assert (found["error"], found["ranks"]) == ("SiteMismatchError", (1 - rank,)), found
        assert f"/left.{1 - rank}" in found["text"] and found["seconds"] < 20


@pytest.mark.parametrize("who", ["all", "one"])
def test_in_a_graph(pools: dict[int, RankPool], who: str) -> None:
    found = pools[2].run(work.in_a_graph, who, STEP)
    assert all(rank["good"] for rank in found), found
    assert [rank["first"] for rank in found] == (["Stopped"] * 2 if who == "all" else ["", "Stopped"])
    if who == "all":
        assert all(rank["again"] for rank in found), found
        return
    check_one_left(*found, "split all_gather")


@pytest.mark.parametrize("who", ["all", "one"])
def test_handles(pools: dict[int, RankPool], who: str) -> None:
    """Dropped handles give their slots back. Where only one rank dropped them, its error has a note that names them."""
    found = pools[2].run(work.between_handle_and_wait, who, STEP)
    if who == "all":
        assert all(rank["error"] == "" and rank["good"] for rank in found), found
        return
    assert {rank["error"] for rank in found} <= {"PeerTimeoutError", "PeerFailedError"}, found
    assert all(rank["ranks"] for rank in found) and not found[0]["notes"], found
    assert "all_gather at site '/left'" in found[1]["notes"][0] and "dropped without wait()" in found[1]["notes"][0]

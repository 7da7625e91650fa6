"""Errors name the rank at fault with four ranks, where others wait for each other too; a stopped job is no fault."""

from __future__ import annotations

import pytest

from tests.harness.outcomes import observe_ranks
from tests.harness.ranks import RankPool
from tests.harness.tiers import in_full

from . import rank_blame

pytestmark = pytest.mark.tier("test")

STEP = 2.0
TIMEOUT, MISMATCH = ("PeerTimeoutError",), ("SiteMismatchError",)


@pytest.mark.parametrize(
    ("kind", "how", "victim", "expected"),
    [
        ("AR", "late", 0, TIMEOUT),
        in_full(("RS", "late", 3, TIMEOUT)),
        in_full(("AG", "stopped", 2, TIMEOUT)),
        ("AR", "stopped", 1, TIMEOUT),
        in_full(("AR", "skips the last", 2, TIMEOUT)),
        ("AG", "skips one", 1, MISMATCH),
        in_full(("AR", "skips one", 0, MISMATCH)),
        in_full(("RS", "skips one", 3, MISMATCH)),
    ],
)
def test_every_error_names_the_victim(
    pools: dict[int, RankPool], kind: str, how: str, victim: int, expected: tuple[str, ...]
) -> None:
    found = pools[4].run(rank_blame.delays, kind, how, victim, STEP)
    for rank in set(range(4)) - {victim}:
        assert found[rank]["error"] in expected, found[rank]
        assert found[rank]["ranks"] == (victim,), (rank, found[rank]["text"])


def test_a_killed_rank() -> None:
    outcomes = observe_ranks("tests.runtime.rank_blame:is_killed", 4, args=("AR", 2), wait_for=(0, 1, 3))
    for rank in (0, 1, 3):
        assert (outcomes[rank].value["error"], outcomes[rank].value["ranks"]) == ("PeerTimeoutError", (2,)), outcomes[rank]


def test_a_rank_that_is_killed_while_memory_grows() -> None:
    """The rank that has noticed it is not at fault, for those that learn of it from that rank."""
    outcomes = observe_ranks("tests.runtime.rank_blame:is_killed_while_memory_grows", 3, args=(2,), wait_for=(0, 1))
    for rank in (0, 1):
        found = outcomes[rank].value
        assert (found["error"], found["ranks"]) == ("PeerTimeoutError", (2,)), found
        assert "rank 2 of the group is gone" in found["text"]


def test_a_rank_that_is_late_while_memory_grows(pools: dict[int, RankPool]) -> None:
    for found in pools[3].run(rank_blame.is_late_while_memory_grows, 2, STEP)[:2]:
        assert (found["error"], found["ranks"]) == ("PeerTimeoutError", (2,)), found


@pytest.mark.tier("full")
@pytest.mark.parametrize("where", ["op", "bind"])
def test_a_job_that_was_stopped(pools: dict[int, RankPool], where: str) -> None:
    for found in pools[2].run(rank_blame.all_stopped, where, 2.0):
        assert found["error"] == "", found
        assert found["seconds"] < 60

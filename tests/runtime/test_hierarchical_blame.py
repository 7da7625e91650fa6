"""Errors of hierarchical collectives name the rank at fault, by its number in the group that the user named.

The halves run on groups of two ranks, within a host and across hosts. A rank that does not come delays all four ranks: one
waits for it across hosts, one within its host, and one for a rank that waits for it.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness.outcomes import observe_ranks
from tests.harness.ranks import RankPool
from tests.harness.tiers import full_but

from . import rank_hierarchical_blame
from .rank_hierarchical_blame import VICTIM

pytestmark = pytest.mark.tier("test")

COLLECTIVES = ("all_gather", "reduce_scatter")
OTHERS = (0, 1, 2)


def check(found: dict[str, Any], rank: int) -> None:
    assert found["error"] in ("PeerTimeoutError", "PeerFailedError") and found["ranks"] == (VICTIM,), (rank, found)
    assert f"rank {VICTIM} of the group" in found["text"] and "group '" in found["text"], found["text"]
    host, number = divmod(rank, 2)
    expected = {"within": (rank, [2 * host, 2 * host + 1]), "across": (rank, [number, 2 + number])}
    assert all(expected[name] == row for name, row in found["flight"].items()) and found["flight"], found["flight"]


@pytest.mark.parametrize("collective", full_but(["reduce_scatter"], COLLECTIVES))
def test_a_killed_rank(collective: str) -> None:
    outcomes = observe_ranks("tests.runtime.rank_hierarchical_blame:is_killed", 4, args=(collective,), wait_for=OTHERS)
    for rank in OTHERS:
        check(outcomes[rank].value, rank)


@pytest.mark.parametrize("collective", full_but(["all_gather"], COLLECTIVES))
def test_a_rank_that_stays_away(pools: dict[int, RankPool], collective: str) -> None:
    """All deadlines are over at about the same time: who waits for a rank that waits elsewhere lets that one report first."""
    found = pools[4].run(rank_hierarchical_blame.stays_away, collective, 2.0)
    for rank in OTHERS:
        check(found[rank], rank)

"""Sessions: many groups, growth, new shapes, several hosts, and a group created again under its old name."""

from __future__ import annotations

import pytest

from tests.harness.outcomes import observe_ranks
from tests.harness.ranks import RankPool

from . import rank_sessions

pytestmark = pytest.mark.tier("test")


def test_growth_and_unseen_shapes(pools: dict[int, RankPool]) -> None:
    for found in pools[2].run(rank_sessions.shapes):
        assert found["bad"] == []
        assert found["asked"] == 0
        assert len(found["grown"]) >= 2


def test_groups(pools: dict[int, RankPool]) -> None:
    assert pools[4].run(rank_sessions.groups) == [[]] * 4


def test_a_group_of_one(pools: dict[int, RankPool]) -> None:
    assert pools[2].run(rank_sessions.alone) == [[]] * 2


def test_other_hosts(pools: dict[int, RankPool]) -> None:
    for found in pools[2].run(rank_sessions.hosts):
        assert not any(found["bad"].values()), found["bad"]
        assert found["stats"]["transport"] == "c10d"
        assert "host0, host1" in found["stats"]["reason"]


def test_close(pools: dict[int, RankPool]) -> None:
    for found in pools[2].run(rank_sessions.closed):
        assert found == {"bad": [], "left": []}


def test_same_name_again() -> None:
    for outcome in observe_ranks("tests.runtime.rank_sessions:again", 2, args=(0,)):
        assert outcome.error == "", outcome.text
        assert outcome.value == {"bad": [], "same": True, "sessions": 2}


def test_autocast(pools: dict[int, RankPool]) -> None:
    assert pools[2].run(rank_sessions.autocast) == [[]] * 2


def test_two_threads_with_a_group_each(pools: dict[int, RankPool]) -> None:
    assert pools[2].run(rank_sessions.threads) == [[]] * 2


def test_a_destroyed_group_leaves_no_session(pools: dict[int, RankPool]) -> None:
    assert pools[2].run(rank_sessions.gone) == [[]] * 2

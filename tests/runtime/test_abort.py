"""ub_overlap.abort: the waits of a group end at once, on the rank that aborts and on its peers, from any state."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness.ranks import RankPool
from tests.harness.tiers import full_but

from . import rank_abort

pytestmark = pytest.mark.tier("test")

SLACK = 20.0
"""Seconds that a busy machine may add. The deadlines of the waits are 60 s."""


def _aborted(found: dict[str, Any]) -> None:
    assert found["error"] == "GroupAbortedError", found
    assert found["seconds"] < SLACK


def _told(found: dict[str, Any]) -> None:
    assert (found["error"], found["ranks"]) == ("PeerFailedError", (0,)), found
    assert "ub_overlap.abort()" in found["text"]
    assert found["seconds"] < SLACK


@pytest.mark.parametrize("where", full_but(["plan check", "op"], ["bind", "plan check", "growth", "op"]))
def test_while_an_op_waits(pools: dict[int, RankPool], where: str) -> None:
    first, *others = pools[3].run(rank_abort.within, where)
    for found in first:
        _aborted(found)
        assert "the scheduler said so" in found["text"] and "thread 'supervisor'" in found["text"]
        assert "all_gather_matmul at site" in found["text"]
    for found, *then in others:
        _told(found)
        assert "the scheduler said so" in found["text"]
        assert all(later["error"] and later["seconds"] < SLACK for later in then)


def test_before_the_first_op(pools: dict[int, RankPool]) -> None:
    (first,), *others = pools[2].run(rank_abort.before_the_first_op)
    _aborted(first)
    for (found,) in others:
        _told(found)


def test_with_a_hanging_store(pools: dict[int, RankPool]) -> None:
    _aborted(pools[2].run(rank_abort.with_a_hanging_store)[0])


def test_after_destroy() -> None:
    """A destroyed group is left alone, and so is a later group. A name that no group had is a mistake."""
    with RankPool(2) as pool:  # a separate pool: abort() covers all groups
        for first, second, unknown, last in pool.run(rank_abort.after_destroy):
            assert first["error"] == second["error"] == "", first
            assert unknown["error"] == "OptionError"
            _aborted(last)

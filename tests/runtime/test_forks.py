"""Forked children: they never act as their parent, and work with groups of their own."""

from __future__ import annotations

import pytest

from tests.harness.outcomes import observe_ranks

pytestmark = pytest.mark.tier("test")


def _values(function: str, *args: object) -> list[object]:
    outcomes = observe_ranks(f"tests.runtime.rank_forks:{function}", 2, args=args)
    assert all(outcome.ended and not outcome.error for outcome in outcomes), outcomes
    return [outcome.value for outcome in outcomes]


@pytest.mark.parametrize(
    ("imported", "strategy"), [("ub_overlap.runtime.ops", "pipelined"), ("", "pipelined"), ("ub_overlap", "none")]
)
def test_fork_before_the_first_op(imported: str, strategy: str) -> None:
    """The child gets a ForkError, and the peer the parent's tensor: it would match neither seed with the child's.

    `imported`: what the parent has imported at the fork.
    """
    (_, peer), (child, parent) = _values("before_the_first_op", imported, strategy)
    assert (peer, parent) == ([], []), "the peer received other data"
    assert child[0] == "ForkError", child
    assert "this process was forked from the one that created group" in child[1]
    assert "spawn" in child[1]


@pytest.mark.parametrize("destroy_first", [False, True])
def test_children_with_a_group_of_their_own(destroy_first: bool) -> None:
    assert _values("own_group", destroy_first) == [([], [])] * 2


def test_forked_data_loaders() -> None:
    assert _values("data_loader") == [[]] * 2


def test_check_errors_in_a_child() -> None:
    assert _values("check_errors_in_child") == [(None, [])] * 2


def test_abort_in_a_child() -> None:
    """It says that the child may not, and the parents' first call is not told of it."""
    (_, peer), (child, parent) = _values("abort_in_child")
    assert (peer, parent) == ([], [])
    assert child[0] == "ForkError", child
    assert "this process was forked from the one that created group" in child[1]

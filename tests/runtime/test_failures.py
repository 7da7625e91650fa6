"""Peer failures raise an error before the deadline that names the peer. No shared memory is left open (conftest.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness.outcomes import observe_ranks
from tests.harness.ranks import RankPool
from tests.harness.tiers import full_but

from . import rank_failures

pytestmark = pytest.mark.tier("test")

STEP = 2.5
SLACK = 20.0
"""Seconds that a busy machine may add. Deadlines that must not be reached are longer."""


def test_a_rank_that_skips_a_call(pools: dict[int, RankPool]) -> None:
    found = pools[3].run(rank_failures.never_calls, STEP)
    for first, then in found[:2]:
        assert (first["error"], first["ranks"]) == ("PeerTimeoutError", (2,)), first
        assert STEP * 0.9 < first["seconds"] < STEP + SLACK
        assert "rank 2 of the group did not arrive" in first["text"]
        assert "all_gather_matmul at site '/g', phase READY" in first["text"]
        assert then["error"] == "SessionPoisonedError"
        assert then["seconds"] < SLACK, "it does not wait for the deadline, which is longer by then"
    # The rank that skipped the call gets the error at its next call.
    assert found[2][1]["error"] == "PeerTimeoutError"
    assert found[2][1]["ranks"] == (2,)


def test_a_rank_that_never_binds(pools: dict[int, RankPool]) -> None:
    found = pools[3].run(rank_failures.never_binds, STEP)
    for rank in (0, 2):
        assert found[rank]["error"] in ("PeerTimeoutError", "PeerFailedError"), found[rank]
        assert "rank 1 of the group did not arrive at the first call of group" in found[rank]["text"]
        assert "all_gather_matmul at site '/g'" in found[rank]["text"]
        assert found[rank]["seconds"] < STEP + SLACK


@pytest.mark.parametrize("how", ["hosts", "none"])
def test_a_plain_collective(pools: dict[int, RankPool], how: str) -> None:
    """The error of a plain collective names site, rank and the deadline, which is c10d's. Its cause is c10d's error."""
    found = pools[2].run(rank_failures.plain_collective, how, 2.0)[0]
    assert (found["error"], found["ranks"]) == ("CollectiveError", ()), found
    assert "failed on rank 0 of the group" in found["text"]
    assert "all_gather_matmul at site '/plain', group '" in found["text"]
    assert "the deadline of the process group, 2 s" in found["text"]
    assert found["seconds"] < 2 + SLACK
    assert found["cause"] == "RuntimeError"


@pytest.mark.parametrize("rows", [5, 300_000])
def test_other_shapes(pools: dict[int, RankPool], rows: int) -> None:
    """Different shapes raise an error, also if only one rank would have to grow its arena."""
    for rank, found in enumerate(pools[3].run(rank_failures.other_shapes, rows)):
        assert found["error"] == "ShapeMismatchError", (rank, found)
        assert f"[{rows}, 4]" in found["text"]
        assert "[4, 4]" in found["text"]
        assert "rank 1: " in found["text"]
        assert found["seconds"] < SLACK


def test_every_nvtx_range_is_closed(pools: dict[int, RankPool]) -> None:
    """Every NVTX range is closed, also that of a call that raises. There are no extra ranges or pops."""
    for failed, found in pools[2].run(rank_failures.ranges):
        assert failed["error"] == "ShapeMismatchError", failed
        names = ["all_gather_matmul[forward.0]", "matmul_reduce_scatter[forward.1]", "all_gather_matmul[backward.0]"]
        assert found == [text for name in names for text in (f"ub_overlap::{name}", "")]


def test_other_sites(pools: dict[int, RankPool]) -> None:
    for found in pools[3].run(rank_failures.other_sites):
        assert found["error"] == "SiteMismatchError", found
        assert "rank 1: matmul_reduce_scatter at site '/of.scatter'" in found["text"]
        assert "all_gather_matmul at site '/of.gather'" in found["text"]
        assert found["seconds"] < SLACK


def test_other_plans(pools: dict[int, RankPool], tmp_path: Path) -> None:
    found = pools[3].run(rank_failures.other_plans, str(tmp_path))
    for rank in (0, 2):
        assert (found[rank]["error"], found[rank]["ranks"]) == ("PlanMismatchError", (1,)), found[rank]
        assert "rank 1: site id=forward.1 kind=all_gather_matmul strategy=bulk" in found[rank]["text"]
    assert (found[1]["error"], found[1]["ranks"]) == ("PlanMismatchError", (0, 2))


def test_a_plan_for_another_number_of_ranks(pools: dict[int, RankPool], tmp_path: Path) -> None:
    """A graph from before its groups were made again, with fewer ranks, is an error that says what to do."""
    for found in pools[2].run(rank_failures.planned_for_others, str(tmp_path)):
        for ranks, seen in zip((2, 1), found, strict=True):
            assert (seen["error"], seen["ranks"]) in (
                ("PlanMismatchError", ()),
                ("PeerFailedError", (0,)),
                ("PeerFailedError", (1,)),
            )
            assert f"compiled for 3 ranks runs on a group of {ranks}" in seen["text"], seen
            assert seen["seconds"] < SLACK


def test_same_plans(pools: dict[int, RankPool]) -> None:
    assert {found["error"] for found in pools[3].run(rank_failures.same_plans)} == {""}


def test_a_rank_that_raises_alone(pools: dict[int, RankPool]) -> None:
    found = pools[3].run(rank_failures.raises_alone)
    assert found[1]["error"] == "MemoryError"
    for rank in (0, 2):
        assert found[rank]["error"] == "PeerFailedError", found[rank]
        assert "rank 1 of the group failed" in found[rank]["text"]
        assert "no room for schedules" in found[rank]["text"]
        assert "all_gather_matmul at site '/g'" in found[rank]["text"]
        assert found[rank]["seconds"] < SLACK


def test_an_unknown_compute_kind(pools: dict[int, RankPool]) -> None:
    for found in pools[2].run(rank_failures.unknown_compute_kind):
        assert found["ours"] and "step 0 of a schedule has an unknown kind, compute kind 7" in found["text"], found


def test_bad_arguments(pools: dict[int, RankPool]) -> None:
    assert pools[2].run(rank_failures.bad_arguments) == [[]] * 2


@pytest.mark.parametrize("compiled", full_but([False], [False, True]))
def test_errors_come_out_of_backward(pools: dict[int, RankPool], compiled: bool) -> None:
    found = pools[2].run(rank_failures.in_backward, compiled)[0]
    assert (found["error"], found["ranks"], found["ours"]) == ("PeerTimeoutError", (1,), True), found
    assert "gradient changed" not in found["text"]


def _check_names_rank_1(found: Any, limit: float) -> None:
    first, then = found
    assert (first["error"], first["ranks"]) == ("PeerTimeoutError", (1,)), first
    assert first["seconds"] < limit
    assert then["error"] == "SessionPoisonedError"


@pytest.mark.parametrize("how", ["SIGKILL", "SIGKILL-during"])
def test_killed(how: str) -> None:
    """A peer's death is detected long before the deadline."""
    outcomes = observe_ranks("tests.runtime.rank_failures:dies", 3, args=(how, 60.0))
    for rank in (0, 2):
        _check_names_rank_1(outcomes[rank].value, SLACK)
        assert "rank 1 of the group is gone" in outcomes[rank].value[0]["text"]
        assert "epoch" not in outcomes[rank].value[0]["text"]


@pytest.mark.parametrize("how", full_but(["SIGSTOP-during"], ["SIGSTOP", "SIGSTOP-during"]))
def test_stopped(how: str) -> None:
    outcomes = observe_ranks("tests.runtime.rank_failures:dies", 3, args=(how, 3.0), wait_for=(0, 2))
    for rank in (0, 2):
        _check_names_rank_1(outcomes[rank].value, 3.0 + SLACK)
        assert "its process exists, without progress in the group for" in outcomes[rank].value[0]["text"]


def test_killed_while_binding() -> None:
    """The death of a rank that has shared its memory is seen long before the deadline."""
    outcomes = observe_ranks("tests.runtime.rank_failures:dies_binding", 2)
    found = outcomes[0].value
    assert (found["error"], found["ranks"]) == ("PeerTimeoutError", (1,)), found
    assert "rank 1 of the group is gone" in found["text"]
    assert found["seconds"] < SLACK


@pytest.mark.parametrize("how", full_but(["SIGKILL"], ["SIGKILL", "SIGSTOP"]))
def test_the_host_of_the_store(how: str) -> None:
    """The session has a deadline for a Store that does not answer. c10d has none."""
    init_s = 3.0 if how == "SIGSTOP" else 60.0
    outcomes = observe_ranks("tests.runtime.rank_failures:store_ends", 3, args=(how, init_s), wait_for=(1, 2))
    for outcome in outcomes[1:]:
        found = outcome.value
        # A rank that is notified by the other rank before it queries the Store raises that rank's error.
        heard = how == "SIGKILL" and found["error"] == "PeerFailedError" and "failed" in found["text"]
        assert heard or (found["error"] == "PeerTimeoutError" and 0 in found["ranks"]), found
        assert "all_gather_matmul at site 'dddddddd44444444/forward.0'" in found["text"]
        assert found["seconds"] < (init_s if how == "SIGSTOP" else 0) + SLACK
        assert "the Store of group" in found["text"] or (how == "SIGKILL" and "is gone" in found["text"])


@pytest.mark.parametrize("binding", [False, True])
def test_ctrl_c(binding: bool) -> None:
    """Ctrl-C ends a wait at once, and the peers are notified."""
    first, second = (o.value for o in observe_ranks("tests.runtime.rank_failures:interrupted", 2, args=(binding,)))
    assert first["error"] == "KeyboardInterrupt"
    assert first["seconds"] < SLACK
    assert (second["error"], second["ranks"]) == ("PeerFailedError", (0,)), second
    assert "KeyboardInterrupt" in second["text"]
    assert second["seconds"] < SLACK


def test_fork() -> None:
    for outcome in observe_ranks("tests.runtime.rank_failures:forks", 2):
        child, later = outcome.value
        assert child["error"] == "ForkError"
        assert later == []


def test_no_room_in_shared_memory(pools: dict[int, RankPool]) -> None:
    for found in pools[2].run(rank_failures.no_room):
        assert found["error"] == "ArenaError", found
        assert "memory limit of the container" in found["text"]

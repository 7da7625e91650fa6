"""start_collective and finish_collective on the CPU executor: results bit by bit, misuse, and ranks that fail between."""

from __future__ import annotations

import pytest

from tests.harness.outcomes import observe_ranks
from tests.harness.ranks import RankPool
from ub_overlap.runtime import ops

from . import rank_split

STEP = 2.5
SLACK = 20.0


@pytest.mark.parametrize(("world", "times"), [(2, 160), (3, 60)])
def test_any_order_with_delays(pools: dict[int, RankPool], world: int, times: int) -> None:
    assert pools[world].run(rank_split.random_program, times, 300, world) == [[]] * world


@pytest.mark.parametrize("world", [2, 3])
def test_equals_bulk_and_c10d(pools: dict[int, RankPool], world: int) -> None:
    assert pools[world].run(rank_split.equals_bulk) == [[]] * world


def test_misuse_is_named_and_harmless(pools: dict[int, RankPool]) -> None:
    for found in pools[2].run(rank_split.misuse):
        assert [one["error"] for one in found] == ["OptionError"] * 7 + [""], found
        texts = [one["text"] for one in found[:7]]
        assert "split slot 0 has no open collective" in texts[0]
        assert "split all_gather at site '/split.0' was started and not finished" in texts[1]
        assert "split slot 0 holds another collective than the one to finish" in texts[2]
        assert "there is no such split slot" in texts[3]
        assert "neither stripes nor products at their owners" in texts[4]
        assert "not a contiguous tensor of the result's sizes" in texts[5]
        assert "only a gather can return its landing memory" in texts[6]


def test_misuse_of_zero_copy_is_named_and_harmless(pools: dict[int, RankPool]) -> None:
    for found in pools[2].run(rank_split.misuse_of_zero_copy):
        assert [one["error"] for one in found] == ["OptionError"] * 5 + [""], found
        early, *texts = [one["text"] for one in found[:5]]
        assert "split slot 0 has no result to release" in early and "'/split.0', which is not finished" in early
        assert "split all_gather at site '/split.0' was finished and not released" in texts[0]
        assert "is finished already" in texts[1]
        assert "the result of split all_gather at site '/split.0'" in texts[2]
        assert "no open collective" in texts[3]


def test_zero_copy_returns_landing_memory(pools: dict[int, RankPool]) -> None:
    assert pools[2].run(rank_split.is_landing_memory) == [[], []]


def test_a_rank_that_never_releases(pools: dict[int, RankPool]) -> None:
    """Its next start of the slot is an error at once. Its peers name it at the deadline."""
    *peers, last = pools[3].run(rank_split.never_releases, STEP, False)
    assert all(found["other"] == [] for found in (*peers, last))
    assert last["error"] == "OptionError" and "finished and not released" in last["text"], last
    for found in peers:
        assert (found["error"], found["ranks"]) == ("PeerTimeoutError", (2,)), found
        assert STEP * 0.9 < found["seconds"] < STEP + SLACK


@pytest.mark.tier("test")
def test_a_rank_that_dies_before_its_release() -> None:
    found = observe_ranks("tests.runtime.rank_split:never_releases", 2, args=(60.0, True))[0].value
    assert (found["error"], found["ranks"]) == ("PeerTimeoutError", (1,)), found
    assert "split all_gather at site '/split.0'" in found["text"]
    assert found["seconds"] < SLACK


def test_a_rank_that_never_finishes(pools: dict[int, RankPool]) -> None:
    """Peers finish, and run other calls. The next collective of the slot names the rank."""
    *peers, last = pools[3].run(rank_split.never_finishes, STEP)
    for found in (*peers, last):
        assert (found["first"], found["other"]) == ("", []), found
    for found in peers:
        assert (found["error"], found["ranks"]) == ("PeerTimeoutError", (2,)), found
        assert "split all_gather at site '/split.0', phase " in found["text"]
        assert STEP * 0.9 < found["seconds"] < STEP + SLACK


def test_a_rank_that_never_starts(pools: dict[int, RankPool]) -> None:
    for found in pools[3].run(rank_split.never_starts, STEP)[:2]:
        assert (found["error"], found["ranks"]) == ("PeerTimeoutError", (2,)), found
        assert "split all_gather at site '/split.0', phase " in found["text"]


def test_another_order_in_one_slot(pools: dict[int, RankPool]) -> None:
    for found in pools[2].run(rank_split.other_order, True, 30.0):
        assert found["error"] == "SiteMismatchError", found
        assert "/order.0" in found["text"]
        assert "/order.1" in found["text"]
        assert found["seconds"] < 25, "a mismatch needs no deadline"


@pytest.mark.parametrize("same_slot", [True, False])
def test_another_site_when_memory_grows(pools: dict[int, RankPool], same_slot: bool) -> None:
    """Equal sizes do not hide it: all ranks name the one at another site, at once."""
    for found in pools[3].run(rank_split.other_site_grows, same_slot):
        assert (found["error"], found["ranks"]) == ("SiteMismatchError", (2,)), found
        assert "/order.0" in found["text"] and "/order.1" in found["text"] and found["seconds"] < 20, found


def test_another_order_of_two_slots(pools: dict[int, RankPool]) -> None:
    for found in pools[2].run(rank_split.other_order, False, STEP):
        assert found["error"] == "PeerTimeoutError", found
        assert "/order." in found["text"]
        assert found["seconds"] < 2 * STEP + SLACK


@pytest.mark.tier("test")
def test_a_rank_that_dies_between() -> None:
    found = observe_ranks("tests.runtime.rank_split:dies_between", 2, args=(60.0,))[0].value
    assert (found["error"], found["ranks"]) == ("PeerTimeoutError", (1,)), found
    assert "split all_reduce at site '/split.0'" in found["text"]
    assert found["seconds"] < SLACK


def test_hidden_bytes(pools: dict[int, RankPool]) -> None:
    """Bytes that were copied before the finish began count as hidden."""
    for copied, hidden in pools[2].run(rank_split.hidden_bytes, 0.5):
        assert copied == 256 * 64 * 4 and hidden == copied


def test_an_abort_names_the_split_collective_that_waits(pools: dict[int, RankPool]) -> None:
    (own,), (theirs,) = pools[2].run(rank_split.aborted_in_finish)
    assert (own["error"], theirs["error"]) == ("GroupAbortedError", "PeerFailedError"), (own, theirs)
    assert all("split all_gather at site '/split.0'" in found["text"] for found in (own, theirs)), (own, theirs)


def test_a_group_destroyed_with_an_open_collective(pools: dict[int, RankPool]) -> None:
    assert pools[2].run(rank_split.left_open) == [[], []]


@pytest.mark.parametrize("zero_copy", [False, True])
def test_a_slot_is_pushed_to_only_when_read(pools: dict[int, RankPool], zero_copy: bool) -> None:
    """The wait for DONE protects a late reader. Without it its data is overwritten."""
    assert pools[2].run(rank_split.without_done, True, zero_copy, 8)[0] == []
    assert pools[2].run(rank_split.without_done, False, zero_copy, 8)[0], "the missing waits went unseen"


def test_a_trace_has_the_steps_of_both_halves(pools: dict[int, RankPool]) -> None:
    for steps in pools[2].run(rank_split.traced, False):
        assert [kind for queue, kind in steps if queue == "COPY"] == ["wait", "copy", "signal"]
        assert [kind for queue, kind in steps if queue == "COMPUTE"] == ["return", "copy", "wait", "copy", "signal"]
    for steps in pools[2].run(rank_split.traced, True):
        assert [kind for queue, kind in steps if queue == "COPY"] == ["wait", "copy", "signal", "copy"]
        assert [kind for queue, kind in steps if queue == "COMPUTE"] == ["return", "wait", "return", "release", "signal"]


def test_schemas_mutate_nothing_but_what_is_released() -> None:
    """Inductor may move and drop start and finish, and orders finish after start by the token. Release follows all readers."""
    released = ops.DEFINITIONS["release_collective"].overload._schema
    assert released.is_mutable and not released.returns
    for name in ("start_collective", "finish_collective"):
        schema = ops.DEFINITIONS[name].overload._schema
        assert not schema.is_mutable
        assert not any(argument.alias_info for argument in (*schema.arguments, *schema.returns))


def test_in_a_graph(pools: dict[int, RankPool]) -> None:
    assert pools[2].run(rank_split.compiled) == [[], []]


@pytest.mark.parametrize(("collective", "rows"), [("all_gather", 16), ("reduce_scatter", 4), ("all_reduce", 8)])
def test_fakes(pools: dict[int, RankPool], collective: str, rows: int) -> None:
    assert pools[2].run(rank_split.fake_sizes, collective) == [(rows, 3)] * 2

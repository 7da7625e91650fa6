"""send, recv, isend and irecv over shared memory: results, order, misuse, and ranks that fail."""

from __future__ import annotations

import pytest

from tests.harness.outcomes import observe_ranks
from tests.harness.ranks import RankPool
from ub_overlap.runtime.session.channels import PIECE_BYTES, ROUND, SlotPlan, cut_slots

from . import rank_point_to_point as ranks

STEP = 2.0
SLACK = 20.0


@pytest.mark.parametrize(("world", "seed"), [(2, 1), (2, 2), (3, 3)])
def test_any_order_and_size(pools: dict[int, RankPool], world: int, seed: int) -> None:
    assert pools[world].run(ranks.random_messages, seed, 12) == [[]] * world


def test_an_early_receive_delays_no_send(pools: dict[int, RankPool]) -> None:
    first, second = pools[2].run(ranks.early_receive)
    assert first["value"] == [3.0] * 4
    assert second == {"value": [4.0] * 4, "before": False}


def test_messages_of_several_slots(pools: dict[int, RankPool]) -> None:
    size = 20 * ROUND
    assert pools[2].run(ranks.several_slots) == [{"held": [size, size], "wrong": [], "error": "OptionError"}] * 2


@pytest.mark.parametrize(
    ("size", "messages", "plan"),
    [
        (1, 4, SlotPlan(4, ROUND, ROUND)),
        (8 << 20, 4, SlotPlan(4, 8 << 20, 1 << 20)),
        (64 << 20, 4, SlotPlan(16, 16 << 20, 1 << 18)),
        ((64 << 20) + 1, 4, SlotPlan(20, 205 * ROUND, 1 << 18)),
        (64 << 20, 32, SlotPlan(64, 32 << 20, 1 << 19)),
        (256 << 20, 64, SlotPlan(64, 256 << 20, 1 << 20)),
    ],
)
def test_slots_of_a_size(size: int, messages: int, plan: SlotPlan) -> None:
    """Slots hold the messages, have at most PIECE_BYTES where 64 slots allow it, and take the same memory."""
    found = cut_slots(size, messages, 1 << 20)
    assert found.slots * found.near_bytes >= size * messages
    assert found.slots * found.near_bytes < size * messages + found.slots * ROUND
    assert found.slots <= 64 and (found.near_bytes <= PIECE_BYTES or 2 * messages > 64 // 2)
    assert found == plan, found


def test_dtypes_and_layouts(pools: dict[int, RankPool]) -> None:
    assert pools[2].run(ranks.dtypes) == [[], []]


@pytest.mark.parametrize(
    ("what", "got", "expected"),
    [("size", "float [8], tag 0", "[4]"), ("dtype", "double [4], tag 0", "float"), ("tag", "[4], tag 5", "tag 0")],
)
def test_a_mismatch_names_both_ends(pools: dict[int, RankPool], what: str, got: str, expected: str) -> None:
    sender, receiver = pools[2].run(ranks.mismatch, what)
    assert receiver["error"] == "ShapeMismatchError", receiver
    assert receiver["ranks"] == (0,)
    text = receiver["text"].lower()
    assert "recv at site 'channel 0 -> 1'" in text
    assert f"rank 0: {got.lower()}" in text or got.lower() in text
    assert expected in text
    assert sender["error"] == "ShapeMismatchError", sender


def test_misuse_is_named_and_harmless(pools: dict[int, RankPool]) -> None:
    for found in pools[2].run(ranks.misuse):
        assert [one["error"] for one in found] == ["OptionError"] * 7 + [""], found


@pytest.mark.tier("test")
@pytest.mark.parametrize("how", ["kill", "abort"])
def test_a_stage_that_fails(how: str) -> None:
    """Its neighbours name it within twice the deadline, and the others end too. More in test_stage.py."""
    survivors = (0, 2, 3)
    outcomes = observe_ranks("tests.runtime.rank_point_to_point:stage_fails", 4, (STEP, how), wait_for=survivors)
    for rank in survivors:
        found = outcomes[rank].value
        assert found is not None, outcomes[rank]
        assert found["error"] == ("PeerFailedError" if how == "abort" else "PeerTimeoutError"), found
        assert found["ranks"] == (1,), (rank, found)
        assert found["seconds"] < 2 * STEP + SLACK, found
    if how != "abort":
        assert any(" at site 'channel " in outcomes[rank].value["text"] for rank in survivors)


def test_a_message_without_a_receiver(pools: dict[int, RankPool]) -> None:
    found, _ = pools[2].run(ranks.no_receiver, STEP)
    assert found["first"] == ["", ""]
    assert (found["error"], found["ranks"]) == ("PeerTimeoutError", (1,)), found
    assert "send at site 'channel 0 -> 1', phase DONE" in found["text"]


@pytest.mark.parametrize("world", [2, 3])
def test_torch_distributed_uses_channels(pools: dict[int, RankPool], world: int) -> None:
    assert pools[world].run(ranks.c10d) == [[]] * world


def test_ranks_in_different_numbers_of_groups(pools: dict[int, RankPool]) -> None:
    assert pools[3].run(ranks.unequal_groups) == [[2.0, 12.0], [0.0, 10.0], [1.0, 11.0]]


@pytest.mark.tier("test")
def test_a_rank_that_never_makes_the_group() -> None:
    """make_group ends by the deadline of a first call, not by torch's 30 minutes, and names the rank."""
    found = observe_ranks("tests.runtime.rank_point_to_point:never_makes_the_group", 3, (STEP, ""), 90.0, (0, 2))
    for rank in (0, 2):
        assert (found[rank].value["error"], found[rank].value["ranks"]) == ("PeerTimeoutError", (1,)), found[rank]
        assert "pipeline.make_group" in found[rank].value["text"]
        assert found[rank].value["seconds"] < 2 * STEP + SLACK, found[rank]


@pytest.mark.tier("test")
@pytest.mark.parametrize("how", ["abort", "abort in creation"])
def test_an_abort_ends_the_making_of_a_group(how: str) -> None:
    """Of this rank's group, and of its peers'. In creation: every rank has arrived, and c10d waits inside a constructor."""
    ends = (0, 2) if how == "abort" else (0,)
    found = observe_ranks("tests.runtime.rank_point_to_point:never_makes_the_group", 3, (60.0, how), 90.0, ends)
    first, other = found[0].value, found[2].value
    assert first["error"] == "GroupAbortedError" and "enough" in first["text"], first
    assert first["seconds"] < SLACK, first
    if how == "abort":
        assert (other["error"], other["ranks"]) == ("PeerFailedError", (0,)), other
        assert other["seconds"] < SLACK, other


def test_the_timeout_of_a_made_group(pools: dict[int, RankPool]) -> None:
    """Its collectives have the timeout that the caller gave, not the one of the waits in make_group."""
    found = pools[2].run(ranks.timeout_of_a_made_group)[0]
    assert found["error"] and found["seconds"] < SLACK, found


def test_torch_distributed_raises_our_errors(pools: dict[int, RankPool]) -> None:
    _, receiver = pools[2].run(ranks.c10d_mismatch)
    assert receiver["error"] == "ShapeMismatchError", receiver
    assert "recv at site 'channel 0 -> 1'" in receiver["text"]
    assert (receiver["completed"], receiver["success"]) == (True, False)


def test_the_backend_by_its_name(pools: dict[int, RankPool]) -> None:
    assert pools[2].run(ranks.registered) == [[[0.0, 0.0], 2.0, True, False, "OptionError"]] * 2


def test_ranks_of_two_hosts(pools: dict[int, RankPool]) -> None:
    assert pools[2].run(ranks.other_hosts) == [0.0, 10.0]


def test_a_setup_that_fails(pools: dict[int, RankPool]) -> None:
    """The group is unusable afterwards, on all ranks: a second attempt would read what the first one left."""
    first, second = pools[2].run(ranks.setup_fails)
    assert [first[0]["error"], first[0]["ranks"], second[0]["error"]] == ["PeerFailedError", (1,), "ArenaError"], (
        first,
        second,
    )
    for found in (first[1], second[1]):
        assert found["error"] in ("PeerFailedError", "SessionPoisonedError") and "ArenaError" in found["text"], found


def test_a_silent_rank_without_transport(pools: dict[int, RankPool]) -> None:
    assert pools[3].run(ranks.silent_rank_without_transport) == [[0.0, 1.0, 2.0]] * 2 + [[]]


def test_first_messages_of_two_threads(pools: dict[int, RankPool]) -> None:
    got = pools[2].run(ranks.first_messages_of_two_threads)
    assert got == [[[[1.0 - rank] * 4, ["", ""]]] * 3 for rank in range(2)]


def test_a_destroyed_group(pools: dict[int, RankPool]) -> None:
    for found in pools[2].run(ranks.closed):
        assert found["error"] in ("SessionPoisonedError", "PeerTimeoutError"), found

"""ub_overlap.pipeline.Stage: the send before weight gradients, and the order of messages in a channel."""

from __future__ import annotations

import pytest

from tests.harness.outcomes import observe_ranks
from tests.harness.ranks import RankPool
from tests.harness.tiers import in_full
from ub_overlap.runtime.errors import OptionError
from ub_overlap.runtime.point_to_point.send_order import Outgoing, SendOrder

from . import rank_stage as ranks

STEP = 2.0
SLACK = 20.0


def test_the_gradient_arrives_before_weight_gradients_are_computed(pools: dict[int, RankPool]) -> None:
    _, last = pools[2].run(ranks.gradient_arrives_before_weights, True, "early")
    assert last["calls"] == ranks.MICROBATCHES and not last["late"] and last["has_all"], last


def test_the_latch_holds_a_send_that_comes_late(pools: dict[int, RankPool]) -> None:
    """The test above would fail if the send came behind the weight gradients."""
    _, last = pools[2].run(ranks.gradient_arrives_before_weights, False, "late")
    assert last["late"] == [*range(ranks.MICROBATCHES)] and last["has_all"], last


def test_a_v_of_stages_that_overlaps_forward_and_backward(pools: dict[int, RankPool]) -> None:
    assert pools[2].run(ranks.order_of_messages) == [[], []]


@pytest.mark.tier("full")
def test_ranks_that_are_late_at_random(pools: dict[int, RankPool]) -> None:
    """By hand for longer: python -m tests.soak pipeline."""
    assert pools[4].run(ranks.delayed_steps, 2, 4) == [[]] * 4


@pytest.mark.tier("test")
@pytest.mark.parametrize(
    ("how", "name", "others"),
    [("kill", "Interleaved1F1B", 0), ("stop", "1F1B", 0), ("kill", "1F1B", 1), in_full(("drop", "ZBVZeroBubble", 0))],
)
def test_a_stage_that_fails_within_a_schedule(how: str, name: str, others: int) -> None:
    """Every other rank's error names it within twice the deadline, by its rank in the pipeline, and which message waited.

    `others`: ranks of the world before those of the pipeline.
    """
    survivors = (others, *range(others + 2, 4))
    function = "tests.runtime.rank_stage:stage_fails_in_a_schedule"
    outcomes = observe_ranks(function, 4, (STEP, how, name, others), wait_for=survivors)
    for rank in survivors:
        found = outcomes[rank].value
        assert found is not None, outcomes[rank]
        assert found["error"] == "PeerTimeoutError" and found["ranks"] == (1,), (rank, found)
        assert found["seconds"] < 2 * STEP + SLACK, found
        assert "flight:" in found["text"], found
    assert any(" at site 'channel " in outcomes[rank].value["text"] for rank in survivors)


OUTPUT, GRADIENT = Outgoing(1, 3, is_gradient=False), Outgoing(2, 0, is_gradient=True)


def test_an_unsent_message_to_the_same_rank_comes_first() -> None:
    order = SendOrder()
    order.add(OUTPUT, peer=1)
    assert not order.may_send_early(1)
    assert order.may_send_early(0)
    order.send(OUTPUT)
    assert order.may_send_early(1)


def test_a_schedule_with_another_order_is_refused() -> None:
    order = SendOrder()
    order.add_early(GRADIENT, peer=1)
    order.add(OUTPUT, peer=1)
    with pytest.raises(OptionError, match="gradient of stage 2, microbatch 0 was sent before it"):
        order.send(OUTPUT)
    order.send(GRADIENT)
    order.add(OUTPUT, peer=1)
    order.send(OUTPUT)


def test_another_rank_has_an_order_of_its_own() -> None:
    order = SendOrder()
    order.add_early(GRADIENT, peer=1)
    order.add(OUTPUT, peer=0)
    order.send(OUTPUT)


def test_a_step_that_failed_is_forgotten() -> None:
    order = SendOrder()
    order.add(OUTPUT, peer=1)
    order.add_early(GRADIENT, peer=1)
    order.forget(OUTPUT.stage)
    order.forget(GRADIENT.stage)
    order.add(OUTPUT, peer=1)
    order.send(OUTPUT)

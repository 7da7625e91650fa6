"""Ranks whose local batches have other sizes, in every step: one graph and one plan, where the user marks the sizes."""

from __future__ import annotations

import pytest

from tests.harness.ranks import RankPool, run_ranks
from tests.harness.tiers import INNER

from . import rank_local_batches as ranks

pytestmark = pytest.mark.tier("test")


def check(found: list[ranks.Found | str], *modes: str) -> None:
    """Check that all ranks compiled the same two graphs, forward and backward, and computed as without overlap."""
    for one in found:
        assert not isinstance(one, str), one
        differs, digests, own_modes = one
        assert not differs
        assert digests == found[0][1] and len(digests) == 2
        assert own_modes >= set(modes), own_modes


@pytest.mark.tier("full")
@pytest.mark.parametrize("inner", INNER)
def test_sharded_weights(pool2: RankPool, inner: str) -> None:
    check(pool2.run(ranks.sharded_weights, 1024, inner), "split", "pipelined")


@pytest.mark.tier("full")
def test_sharded_weights_and_tensor_parallel(pool4: RankPool) -> None:
    check(pool4.run(ranks.sharded_weights_and_tensor_parallel, 16, timeout=300), "pipelined")


def test_experts(pool2: RankPool) -> None:
    check(pool2.run(ranks.experts, 65536), "split")


@pytest.mark.tier("full")
def test_replicated_weights(pool2: RankPool) -> None:
    """The order of all_reduces does not depend on the batch. (Compiled autograd of torch 2.13 takes no dynamic sizes.)"""
    for differs, digests, modes in pool2.run(ranks.replicated_weights, None):
        assert not differs and len(digests) >= 1 and modes


@pytest.mark.tier("full")
@pytest.mark.parametrize(("dynamic", "text"), [(None, "only sizes differ"), (True, "plans are made for one value")])
def test_without_a_hint(dynamic: bool | None, text: str) -> None:
    """The error, which breaks the group, says what to do."""
    for error in run_ranks(ranks.sharded_weights, 2, None, "aot_eager", dynamic):
        assert isinstance(error, str) and error.startswith("PlanMismatchError"), error
        assert text in error and "mark_dynamic(x, 0, hint_override=" in error, error

"""fully_shard with our collectives on CPU ranks: training, options of FSDP2, checkpoints, groups without transport, a death."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.fake_ranks import FakeRanks
from tests.harness.outcomes import observe_ranks
from tests.harness.ranks import RankPool

from . import rank_fsdp, rank_landing

pytestmark = pytest.mark.tier("test")

STEP = 2.5


def test_trains_as_torch(pool2: RankPool) -> None:
    assert pool2.run(rank_fsdp.trains_as_torch) == [[], []]


@pytest.mark.tier("full")
def test_hybrid_and_partial_resharding(pool4: RankPool) -> None:
    assert pool4.run(rank_fsdp.trains_as_torch) == [[]] * 4


def test_a_divide_factor(pool2: RankPool) -> None:
    assert pool2.run(rank_fsdp.divide_factor) == [[], []]


def test_gathers_in_flight(pool2: RankPool) -> None:
    assert pool2.run(rank_fsdp.asynchronous) == [[], []]


def test_bytes_travel(pool2: RankPool) -> None:
    assert pool2.run(rank_fsdp.bytes_travel) == [[], []]


@pytest.mark.parametrize("world", [2, 4])
def test_landing_memory(world: int, pool2: RankPool, pool4: RankPool) -> None:
    pool = pool2 if world == 2 else pool4
    assert pool.run(rank_landing.landing_memory, 120 if world == 2 else 50) == [[]] * world


def test_results_are_landing_memory(pool2: RankPool) -> None:
    assert pool2.run(rank_landing.uses_landing_memory) == [[], []]


def test_own_groups(pool3: RankPool) -> None:
    """The order of the user's ranks, whatever groups they are in; freed with the user's group."""
    want = {"gathered": [0.0, 1.0, 2.0], "again": True, "left": [], "freed": True, "next": True, "destroyed": True}
    assert pool3.run(rank_landing.own_groups) == [{**want, "signed": True}] * 3


def test_a_rank_that_keeps_a_result() -> None:
    """Ranks that choose different slots get an error that names the site, not a hang."""
    found = observe_ranks("tests.data_parallel.rank_landing:keeps_a_result", 2, args=(STEP,))
    for one in (outcome.value for outcome in found):
        assert one["ours"] and "/fsdp." in one["text"], one
        assert one["seconds"] < 2 * STEP + 20, one


def test_a_checkpoint_is_unaffected(pool2: RankPool, tmp_path: Path) -> None:
    assert pool2.run(rank_fsdp.checkpoints, str(tmp_path)) == [[], []]


def test_dtypes_and_dims(pool2: RankPool) -> None:
    assert pool2.run(rank_fsdp.mixed_dtypes) == [[], []]


@pytest.mark.skipif(rank_fsdp.ShardPlacementResult is None, reason="this torch has one mesh per module")
def test_two_meshes_in_one_module(pool4: RankPool) -> None:
    assert pool4.run(rank_fsdp.two_meshes) == [[]] * 4


def test_removal_and_misuse(pool2: RankPool) -> None:
    assert pool2.run(rank_fsdp.removal) == [[], []]


def test_torchs_collectives_stay_where_ours_cannot_serve(pool2: RankPool) -> None:
    for bad, texts in pool2.run(rank_fsdp.no_transport):
        assert bad == []
        assert sum("keeps torch's collectives: " in text and "host" in text for text in texts) == 1, texts
        assert sum("reduce_scatter of torch.float64" in text for text in texts) == 1, texts
        assert sum("offloaded to the CPU" in text for text in texts) == 4, texts


def test_a_rank_that_dies_in_a_gather() -> None:
    found = observe_ranks("tests.data_parallel.rank_landing:dies_in_gather", 2, args=(STEP,))[0].value
    assert found["error"] in ("PeerDiedError", "PeerTimeoutError", "PeerFailedError"), found
    assert "/fsdp.all_gather" in found["text"] and found["ours"], found
    assert found["seconds"] < 2 * STEP + 20, found


def test_modules_of_one_group(fake2: FakeRanks) -> None:
    """They are served once, by the name of the first, and a model is seen once at its first forward."""
    assert fake2.run(rank_fsdp.modules_of_one_group) == [(2, ["/fsdp.1.all_gather", "/fsdp.all_gather"], 1)]

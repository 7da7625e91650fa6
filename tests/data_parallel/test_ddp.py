"""DistributedDataParallel with our communication hook on 2 CPU ranks."""

from __future__ import annotations

from tests.harness.ranks import RankPool

from . import rank_ddp


def test_trains_as_torch(pool2: RankPool) -> None:
    assert pool2.run(rank_ddp.trains_as_torch) == [[], []]


def test_sixteen_bits(pool2: RankPool) -> None:
    assert pool2.run(rank_ddp.sixteen_bits) == [[], []]


def test_torchs_all_reduce_stays_where_ours_cannot_serve(pool2: RankPool) -> None:
    for bad, texts in pool2.run(rank_ddp.no_transport):
        assert bad == []
        assert sum("keeps torch's collectives" in text and "host" in text for text in texts) == 2, texts
        assert sum("buckets of torch.float64" in text for text in texts) == 1, texts

"""DistributedDataParallel with our communication hook on 2 CPU ranks."""

from __future__ import annotations

import pytest
import torch

from tests.harness.ranks import RankPool
from ub_overlap.runtime.data_parallel import eager_collectives

from . import rank_ddp

KIB = 1 << 10


def test_trains_as_torch(pool2: RankPool) -> None:
    assert pool2.run(rank_ddp.trains_as_torch) == [[], []]


def test_sixteen_bits(pool2: RankPool) -> None:
    assert pool2.run(rank_ddp.sixteen_bits) == [[], []]


def test_torchs_all_reduce_stays_where_ours_cannot_serve(pool2: RankPool) -> None:
    for bad, texts in pool2.run(rank_ddp.no_transport):
        assert bad == []
        assert sum("keeps torch's collectives" in text and "host" in text for text in texts) == 2, texts
        assert sum("buckets of torch.float64" in text for text in texts) == 1, texts


def test_landing_memory_is_bounded(pool2: RankPool) -> None:
    """The first step reduces all gradients as one bucket, of 1.5 MiB here. Pieces of 128 KiB land in 256 KiB of each slot."""
    for same, steps in pool2.run(rank_ddp.landing_memory, 128 * KIB):
        assert all(same)
        largest, calls = [step[0] for step in steps], [step[2] for step in steps]
        assert largest[0] == 6 * 255 * 256 * 4 and max(largest[1:]) == 255 * 256 * 4
        assert calls == [12, 24, 36]  # pieces: of one bucket, then of six
        assert all(slots == [256 * KIB] * 2 for _, slots, _ in steps)


def test_landing_memory_without_pieces(pool2: RankPool) -> None:
    """The slot of the first step's bucket holds twice its bytes, and keeps them."""
    for same, steps in pool2.run(rank_ddp.landing_memory, 1 << 26):
        assert all(same)
        assert [calls for _, _, calls in steps] == [1, 7, 13]
        (all_gradients, _, _), _, (largest, slots, _) = steps
        assert 2 * all_gradients <= slots[0] < 3 * all_gradients and 2 * largest <= slots[1] < 3 * largest


def test_pieces_give_the_same_bits(pool2: RankPool) -> None:
    assert pool2.run(rank_ddp.pieces_of_all_sizes) == [[], []]


@pytest.mark.parametrize(("numel", "itemsize", "count"), [(1, 4, 1), (1 << 24, 4, 1), ((1 << 24) + 1, 4, 2), (10**9, 2, 30)])
def test_size_of_a_piece(numel: int, itemsize: int, count: int) -> None:
    """Pieces are about equal, at most 64 MiB, and begin at aligned addresses."""
    dtype = {2: torch.bfloat16, 4: torch.float32}[itemsize]
    size = eager_collectives.piece_size(torch.empty(numel, dtype=dtype, device="meta"))
    assert -(-numel // size) == count and size * itemsize <= 1 << 26
    assert count == 1 or (size % 512 == 0 and size - numel // count < 1024)


def test_a_rank_that_stops_between_pieces_is_an_error(pool2: RankPool) -> None:
    late = pool2.run(rank_ddp.late_between_pieces, 2.0)[0]
    assert late["error"] == "PeerTimeoutError" and late["ranks"] == (1,) and "/ddp.bucket0" in late["text"]
    assert late["seconds"] < 60

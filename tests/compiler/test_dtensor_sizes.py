"""Local sizes of a DTensor's shards, compared with DTensor itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from ub_overlap.compiler.graph.dtensor_sizes import local_sizes
from ub_overlap.compiler.graph.graph_inputs import GraphInputs
from ub_overlap.compiler.options import parse
from ub_overlap.compiler.passes import JointPass

CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[Any, ...]]] = {
    "even": ((96, 64), (3,), (Shard(0),)),
    "uneven": ((1006, 64), (3,), (Shard(0),)),
    "fewer than ranks": ((64, 6), (4,), (Shard(1),)),
    "replicas": ((1006, 64), (2, 3), (Replicate(), Shard(0))),
    "twice along one dim": ((1006, 64), (3, 4), (Shard(0), Shard(0))),
    "both dims": ((7, 9), (2, 4), (Shard(0), Shard(1))),
}


@pytest.mark.parametrize("name", CASES)
def test_sizes(name: str) -> None:
    shape, mesh, placements = CASES[name]
    shards = [torch.empty(shape)]
    for ranks, placement in zip(mesh, placements, strict=True):
        if isinstance(placement, Shard):
            shards = [
                piece
                for shard in shards
                for piece in placement._split_tensor(shard, ranks, with_padding=False, contiguous=False)[0]
            ]
    expected = tuple(tuple(sorted({shard.shape[dim] for shard in shards})) for dim in range(len(shape)))
    assert local_sizes(shape, mesh, placements) == expected


def test_shards_are_part_of_the_key() -> None:
    """Shard sizes of all ranks are part of the cache key.

    Two models may have equal weights on one rank and different ones on other ranks.
    """
    options = parse({"fp8": "all"}, frozenset())[0]
    assert JointPass(options).uuid() != JointPass(options, GraphInputs(shards=((2, ((334, 336), (64,))),))).uuid()

"""The ops against fp64: all transposes, dtypes, strategies and odd sizes, on 2, 3, 4 and 8 ranks."""

from __future__ import annotations

import pytest
import torch

from tests.harness.ranks import RankPool
from tests.harness.tiers import full_but
from ub_overlap.runtime import ops

from . import rank_ops, rank_sessions


@pytest.mark.parametrize("world", full_but([2, 3], [2, 3, 4, 8]))
def test_values(pools: dict[int, RankPool], world: int) -> None:
    for rank, found in enumerate(pools[world].run(rank_ops.everything)):
        for what, bad in found.items():
            assert not bad, (rank, what)


@pytest.mark.parametrize("world", [2, 3])
def test_direct_calls_of_several_matmuls(pools: dict[int, RankPool], world: int) -> None:
    assert pools[world].run(rank_ops.cut_directs) == [[]] * world


@pytest.mark.parametrize("world", [2, 4])
def test_bitwise(pools: dict[int, RankPool], world: int) -> None:
    assert pools[world].run(rank_sessions.bitwise) == [[]] * world


def test_no_worse_than_gloo(pools: dict[int, RankPool]) -> None:
    assert pools[4].run(rank_sessions.accuracy) == [[]] * 4


def test_every_half_number(pools: dict[int, RankPool]) -> None:
    assert pools[2].run(rank_sessions.every_fp16) == [[]] * 2


def test_opcheck(pools: dict[int, RankPool]) -> None:
    assert pools[2].run(rank_sessions.checked) == [[]] * 2


def test_fakes_take_dtypes_as_integers() -> None:
    """torch 2.11 passes the elements of ScalarType[] to fakes as integers."""
    ops.load()
    lists = [d for d in ops.DEFINITIONS.values() if "ScalarType[]" in d.schema]
    assert len(lists) >= 3
    for definition in lists:
        fields = {name: None for name in definition.arguments._fields}
        bound = definition.bind(**fields | {"out_dtypes": [6, 15]})
        assert bound.out_dtypes == [torch.float32, torch.bfloat16], definition.name

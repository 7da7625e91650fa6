"""Random programs: sequences of random ops, sizes, dtypes and chunk counts on groups of random size, against fp64.

hypothesis draws the programs; the first 1 to 8 ranks of one world of 8 run each as a subgroup, so ops of many kinds share an
arena, the copy engine and the cached schedules in one run. The race tests cover timing, this test covers combinations.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.harness.ranks import RankPool

from . import rank_ops
from .oracle import ALL_TRANSPOSES

Call = dict[str, Any]
_GROUPS: dict[int, Any] = {}  # in the ranks: the subgroups [0 .. size) created so far

CALLS = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(["gather", "scatter", "reduce", "bulk"]),
        "dtype": st.integers(0, 2),
        "outer": st.integers(1, 3),
        "m": st.integers(0, 9),
        "q": st.integers(1, 9),
        "n": st.integers(1, 6),
        "last": st.booleans(),
        "keep": st.booleans(),
        "chunks": st.integers(0, 19),
        "engine": st.booleans(),
        "transposes": st.lists(st.sampled_from(ALL_TRANSPOSES), min_size=1, max_size=3),
        "terms": st.integers(1, 3),
        "addend": st.integers(0, 2),
        "avg": st.booleans(),
    }
)


def one(rank: int, ranks: int, call: Call, seed: int) -> list[str]:
    """Run one call of a program on the subgroup that `rank_ops.group` names."""
    dtype = rank_ops.DTYPES[call["dtype"]]
    strategy = "pipelined" + (f":chunks={call['chunks']}" if call["chunks"] else "")
    m, q, last = call["m"], call["q"], call["last"]
    outer = 1 if last else call["outer"]
    op = "avg" if call["avg"] else "sum"
    if call["kind"] == "gather":
        strategy += ":copies=engine" if call["engine"] else ""
        return rank_ops.gather_case(
            rank, ranks, dtype, outer, m, q, call["n"], last, call["keep"], strategy, call["transposes"], seed
        )
    ks = [call["n"] + t for t in range(call["terms"])]
    if call["kind"] == "bulk":
        collective = ("all_gather", "reduce_scatter", "all_reduce")[call["n"] % 3]
        pieces = f":chunks={call['chunks']}" if call["chunks"] else ""
        return rank_ops.bulk_case(rank, ranks, dtype, collective, (m, q), call["terms"], op, pieces, dtype, seed)
    scatter = call["kind"] == "scatter"
    rows = (m if last else outer * m * ranks) if scatter else m
    cols = q * ranks if last and scatter else q
    return rank_ops.reduce_case(
        rank, ranks, dtype, dtype, rows, ks, cols, outer if scatter else 1, last and scatter, op, call["keep"], call["addend"],
        strategy, seed, scatter,
    )  # fmt: skip


def program(rank: int, world: int, size: int, calls: list[Call], seed: int) -> list[str]:
    """Run `calls` on the first `size` ranks and return a list of errors."""
    if size not in _GROUPS:
        _GROUPS[size] = dist.new_group(list(range(size)))  # on all ranks, as c10d requires
    if rank >= size:
        return []
    plain = rank_ops.group
    rank_ops.group = lambda: _GROUPS[size].group_name
    try:
        return [bad for i, call in enumerate(calls) for bad in one(rank, size, call, seed + 977 * i)]
    finally:
        rank_ops.group = plain


@pytest.mark.tier("full")
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(size=st.integers(1, 8), calls=st.lists(CALLS, min_size=1, max_size=6), seed=st.integers(0, 10**6))
def test_random_programs(pools: dict[int, RankPool], size: int, calls: list[Call], seed: int) -> None:
    for rank, bad in enumerate(pools[8].run(program, size, calls, seed)):
        assert not bad, (rank, torch.__version__, bad)

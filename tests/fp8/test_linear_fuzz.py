"""Random linears in float8 under Inductor on two ranks: they compile, have the layouts that GPUs need, and give right numbers.

UB_OVERLAP_FUZZ=300 runs that many programs with kernels, from a random seed on that a failure names, instead of CI's few.
"""

from __future__ import annotations

import os
import random
from collections import Counter

import pytest

from tests.fp8.linear_fuzz import fuzz
from tests.harness.ranks import RankPool

pytestmark = pytest.mark.tier("full")

COMPILED = [1, 4, 13, 26]
"""Seeds that run with kernels. 1: two stores of one sum; the others: a kept gather that a weight gradient reads."""
LOWERED = 10
PER_JOB = 4
MORE = int(os.environ.get("UB_OVERLAP_FUZZ", "0"))


def check(pool: RankPool, seeds: list[int], has_kernels: bool) -> Counter[str]:
    wrong: dict[str, None] = {}
    seen: Counter[str] = Counter()
    for i in range(0, len(seeds), PER_JOB):
        for found, kinds in pool.run(fuzz, seeds[i : i + PER_JOB], has_kernels, timeout=300):
            wrong.update(dict.fromkeys(found))
            seen.update(kinds)
    assert not wrong, "\n".join(wrong)
    return seen


@pytest.mark.timeout(600)
def test_numbers(pool2: RankPool) -> None:
    seen = check(pool2, COMPILED, has_kernels=True)
    assert seen["site all_gather_matmul pipelined"] and seen["site matmul_reduce_scatter pipelined"]


@pytest.mark.timeout(600)
def test_layouts(pool2: RankPool) -> None:
    """More programs, with empty kernels: errors of Inductor's lowering and of operand layouts do not need kernels."""
    seen = check(pool2, list(range(LOWERED)), has_kernels=False)
    assert seen["call of _scaled_mm"], seen
    for recipe in ("tensorwise", "delayed"):
        assert seen[f"cast forward {recipe}"] and seen[f"cast weight gradient {recipe}"], seen


@pytest.mark.skipif(not MORE, reason="UB_OVERLAP_FUZZ is not set")
def test_more(pool2: RankPool) -> None:
    first = random.randrange(10**6)
    check(pool2, list(range(first, first + MORE)), has_kernels=True)

"""Copies and sums by themselves, and the arithmetic of kernels that the CPU can run. tests/gpu has the same for GPUs."""

from __future__ import annotations

import random

import pytest
import torch

from tests.harness.memory_kernels import DTYPES, compare_copy, compare_sum
from ub_overlap.runtime.extension import extension


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("bytes_per_block", [1, 16, 4098])
def test_copy(blocks: int, bytes_per_block: int) -> None:
    compare_copy("cpu", blocks, bytes_per_block)


@pytest.mark.parametrize("dst", DTYPES)
@pytest.mark.parametrize("src", DTYPES)
def test_sum_is_in_the_order_of_the_sources(src: torch.dtype, dst: torch.dtype) -> None:
    for sources in (1, 2, 3, 4, 8):
        compare_sum("cpu", src, dst, sources, blocks=2, elements=1024)
        compare_sum("cpu", src, dst, sources, blocks=1, elements=37, divisor=3.0)


def test_block_positions() -> None:
    """A position is the quotient and remainder of the number, up to the last number that the divider takes."""
    choose = random.Random(0)
    for per_block in [1, 2, 3, 5, 7, 127, 128, 129, 8191, 65537, 2**30 - 1, *(choose.randrange(1, 2**30) for _ in range(300))]:
        blocks = extension().testing.blocks_at_once(per_block)
        assert blocks * per_block < 2**31 <= (blocks + 1) * per_block
        last = blocks * per_block - 1
        numbers = {
            0,
            last,
            per_block - 1,
            min(per_block, last),
            last - last % per_block,
            *(choose.randrange(last + 1) for _ in range(50)),
        }
        numbers |= {max(0, n - 1) for n in numbers}
        expected = [divmod(n, per_block) for n in sorted(numbers)]
        assert extension().testing.block_positions(blocks, per_block, sorted(numbers)) == expected


def test_positions_of_one_large_block() -> None:
    numbers = [0, 2**31, 2**40 + 1]
    assert extension().testing.blocks_at_once(2**41) == 1
    assert extension().testing.block_positions(1, 2**41, numbers) == [(0, n) for n in numbers]


def test_recent_map_evicts_the_least_recently_used() -> None:
    evicted, left = extension().testing.use_recent_map(3, [1, 2, 3, 1, 4, 5, 1, 2])
    assert evicted == [2, 3, 4] and left == [1, 2, 5]

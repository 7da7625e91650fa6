"""initialize: no later growth, the largest request wins, one log line, and arena sizes."""

from __future__ import annotations

import itertools

import pytest

from tests.harness.ranks import WAIT_S, RankPool
from ub_overlap.runtime.session import arena_size

from . import rank_initialize as work

MIB = 1 << 20
BUDGET = 600 * MIB  # bytes of a rank's slots, for 8192 tokens of 8192 in bf16


@pytest.mark.parametrize("world", [2, 4])
def test_no_growth_after_it(pools: dict[int, RankPool], world: int) -> None:
    for rank, found in enumerate(pools[world].run(work.ahead)):
        assert found["bad"] == []
        assert found["slot"] == MIB
        assert found["again"] == [MIB, MIB]
        assert found["growths"] == 0
        (line,) = found["lines"]
        sizes = (f"{MIB} bytes per slot", f"{2 * MIB} bytes of arena")
        for text in (f"rank {rank} of {world}", "on cpu", "transport shared memory", *sizes):
            assert text in line
        assert f"deadline {WAIT_S} s" in line


@pytest.mark.parametrize("world", [2, 4])
def test_the_largest_request_counts(pools: dict[int, RankPool], world: int) -> None:
    for found in pools[world].run(work.later):
        assert found["bad"] == []
        assert found["first"] < MIB
        assert found["mixed"] == world * MIB
        assert found["most"] == 3 * MIB
        assert found["growths"] == 1
        (line,) = found["lines"]
        assert f"grew from {found['first']} to {world * MIB} bytes per slot" in line


def test_groups_that_need_no_memory(pools: dict[int, RankPool]) -> None:
    for found in pools[2].run(work.without_arena):
        assert found["bad"] == []
        assert (found["alone"], found["hosts"]) == (0, 0)
        (line,) = found["lines"]
        assert "transport c10d" in line
        assert "host0, host1" in line


def test_a_rank_that_does_not_come(pools: dict[int, RankPool]) -> None:
    first, last = pools[2].run(work.alone_in_it)
    assert "rank 1 of the group did not arrive at the first call" in first
    assert last == ""


@pytest.mark.tier("full")
def test_arena_of_a_large_block(pools: dict[int, RankPool]) -> None:
    """A slot is exactly one activation, [8192, 8192] bf16, for any number of ranks (S = H = 8192)."""
    for found in pools[2].run(work.block, 1, 8192, 8192):
        assert found["slots"][-1] == 128 * MIB, found
        assert found["own"] <= BUDGET, found  # measured by the kernel, with control blocks
        assert found["peak"] <= BUDGET, found  # the old slots are freed once the new ones exist


@pytest.mark.parametrize("seed", range(6))
def test_order_of_first_use(pools: dict[int, RankPool], seed: int) -> None:
    """The largest call sets the arena size in any order, and later calls reuse it. Sizes are 1/64 of the large block."""
    for found in pools[4].run(work.block, seed, 1024, 1024):
        slots = found["slots"]
        assert slots == sorted(slots)
        assert slots[-1] == 2 * MIB
        assert 64 * found["peak"] <= BUDGET


def test_growth_keeps_the_budget() -> None:
    """Gradual growth to the largest size stays within the memory budget, also while growing."""
    largest = 8192 * 8192 * 2
    for start, step in itertools.product((1, 1 << 18, 100 * MIB), (1 << 12, 1 << 20, 5_000_003, 50 * MIB)):
        held = growths = 0
        for needed in [*range(start, largest, step), largest]:
            if needed > held:
                size = arena_size.round_slot_bytes(needed)
                assert needed <= size <= max(1 << 18, needed + needed // 8 + (1 << 16))
                assert 2 * (held + size) <= BUDGET
                held, growths = size, growths + 1
        assert held == largest
        assert growths <= 1 + 9 * 10  # eight per octave, ten octaves above the first slot

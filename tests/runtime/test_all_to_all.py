"""start_all_to_all and finish_all_to_all on the CPU: pieces of any size bit by bit, misuse, graphs with unbacked splits."""

from __future__ import annotations

import pytest

from tests.harness.outcomes import observe_ranks
from tests.harness.ranks import RankPool
from tests.harness.tiers import INNER, full_but

from . import rank_all_to_all as work
from . import rank_ordered_rows as ordered

pytestmark = pytest.mark.tier("test")

STEP = 2.5
SLACK = 20.0
FIRST_BYTES = 1 << 18
"""Of a slot's memory, at least."""

MISUSE = [
    "output_splits has not one number per rank",
    "input_splits has a negative number",
    "input_splits do not sum up to the rows of the input",
    "a tensor without dims cannot be exchanged",
    "there is no such split slot",
    "an all_to_all has no such strategy",
    "split slot 0 has no open collective",
    "split slot 0 is in use by an open collective",
    "split slot 0 holds another collective than the one to finish",
    "the function has no gradient",
    "dim 0 cannot be divided evenly",
]


@pytest.mark.parametrize("strategy", ["bulk", "none"])
@pytest.mark.parametrize("world", [2, 3])
def test_values(pools: dict[int, RankPool], world: int, strategy: str) -> None:
    assert pools[world].run(work.values, strategy) == [[]] * world


@pytest.mark.parametrize(("world", "strategy", "rows"), [(2, "bulk", 0), (3, "bulk", 0), (2, "none", 0), (3, "bulk", 30_000)])
def test_rows_in_another_order(pools: dict[int, RankPool], world: int, strategy: str, rows: int) -> None:
    """Read where they have landed, or, with pieces of several rounds, from a copy."""
    assert pools[world].run(ordered.in_other_orders, strategy, rows) == [[]] * world


@pytest.mark.parametrize("strategy", ["bulk", "none"])
def test_orders_that_are_none(pools: dict[int, RankPool], strategy: str) -> None:
    (high, low, dtype, dims, rest), other = pools[2].run(ordered.wrong_orders, strategy)
    assert high == "IndexError: index 4 is out of bounds for dimension 0 with size 4", high
    assert low == "IndexError: index -5 is out of bounds for dimension 0 with size 4", low
    assert dtype.startswith("OptionError") and "[2] of Int on cpu" in dtype, dtype
    assert dims.startswith("OptionError") and "[1, 1] of Long on cpu" in dims, dims
    assert rest == "" and other == [""]


@pytest.mark.parametrize("strategy", ["bulk", "none"])
def test_any_order(pools: dict[int, RankPool], strategy: str) -> None:
    assert pools[3].run(work.random_program, 60, 5, strategy) == [[]] * 3


def test_handles(pools: dict[int, RankPool]) -> None:
    assert pools[2].run(work.handles) == [[], []]


@pytest.mark.parametrize("strategy", ["bulk", "none"])
def test_misuse_is_named_and_harmless(pools: dict[int, RankPool], strategy: str) -> None:
    for found in pools[2].run(work.misuse, strategy):
        assert [one["error"] for one in found] == ["OptionError"] * len(MISUSE) + [""], found
        assert [text for text, one in zip(MISUSE, found, strict=False) if text not in one["text"]] == []


def test_across_hosts(pools: dict[int, RankPool]) -> None:
    assert pools[2].run(work.in_order, "values", "bulk") == [[], []]


def test_fakes_with_unbacked_splits(pools: dict[int, RankPool]) -> None:
    assert pools[2].run(work.unbacked_fakes) == [("sum", 3, "torch.bfloat16")] * 2


@pytest.mark.parametrize("inner", INNER)
def test_in_a_graph(pools: dict[int, RankPool], inner: str) -> None:
    assert pools[2].run(work.compiled, inner) == [[], []]


def test_areas_grow_on_all_ranks_at_the_same_call(pools: dict[int, RankPool]) -> None:
    """Call 4 is the first with a large piece, in the first window of 8 calls. The areas grow at the beginning of the third."""
    found = pools[3].run(work.grows_and_rounds)
    for rank in found:
        assert rank["bad"] == []
        assert rank["sizes"] == found[0]["sizes"]
        assert rank["sizes"][:16] == [FIRST_BYTES] * 16
        assert rank["grown"] == 2 and rank["sizes"][16] >= 3 * 300_000 * 12 * 5 // 4


def test_the_first_call_of_a_site_grows_the_areas(pools: dict[int, RankPool]) -> None:
    sizes, theirs = pools[2].run(work.first_calls_of_sites)
    assert sizes == theirs and sizes[0] == FIRST_BYTES
    assert sizes[1] >= 2 * 200_000 * 12 and sizes[1:] == [sizes[1]] * 4


@pytest.mark.parametrize(("world", "times"), [(2, 12), (3, 6)])
def test_rounds_with_delays(pools: dict[int, RankPool], world: int, times: int) -> None:
    assert pools[world].run(work.delayed_rounds, times) == [[]] * world


def test_a_round_waits_for_the_one_before(pools: dict[int, RankPool]) -> None:
    """The wait for READY2 protects a late reader. Without it its data is overwritten."""
    assert pools[2].run(work.without_credits, True)[0] == []
    assert pools[2].run(work.without_credits, False)[0], "the missing waits went unseen"


@pytest.mark.parametrize("late_s", [0.0, 0.5])
def test_splits_that_disagree(pools: dict[int, RankPool], late_s: float) -> None:
    """An error names both ranks and their splits, and no rank waits for its deadline."""
    *_, last = pools[2].run(work.disagrees, 30.0, late_s)
    assert last["error"] == "ShapeMismatchError" and 0 in last["ranks"], last
    assert "output_splits=[2, 4]" in last["text"] and "input_splits=[0, 1]" in last["text"], last
    assert last["seconds"] < 25


@pytest.mark.parametrize("how", full_but(["absent"], ["absent", "leaves"]))
def test_a_rank_that_stays_away(pools: dict[int, RankPool], how: str) -> None:
    for found in pools[3].run(work.stays_away, STEP, how)[:2]:
        assert (found["error"], found["ranks"]) == ("PeerTimeoutError", (2,)), found
        assert "split all_to_all at site '/exchange.0'" in found["text"]
        assert STEP * 0.9 < found["seconds"] < 2 * STEP + SLACK


def test_a_rank_at_a_new_site(pools: dict[int, RankPool]) -> None:
    """It learns at once that the others do not come, and they learn of it: no rank waits for its deadline."""
    found = pools[3].run(work.is_at_a_new_site, 60.0)
    assert {one["error"] for one in found} == {"SiteMismatchError"} and {one["ranks"] for one in found} == {(2,)}, found
    assert "site '/new'" in found[2]["text"] and "site '/exchange.0'" in found[2]["text"], found[2]
    assert max(one["seconds"] for one in found) < 30


def test_a_rank_that_dies_between() -> None:
    found = observe_ranks("tests.runtime.rank_all_to_all:stays_away", 2, args=(60.0, "dies"))[0].value
    assert (found["error"], found["ranks"]) == ("PeerTimeoutError", (1,)), found
    assert found["seconds"] < SLACK


def test_traces_have_the_steps_that_ran(pools: dict[int, RankPool]) -> None:
    for rows, markers in ((1, 1), (100_000, 2)):
        for steps in pools[2].run(work.traced_rounds, rows):
            assert all(is_sound for *_, is_sound in steps), steps
            assert [kind for _, kind, _ in steps].count("round") == markers
            assert ("COPY", "copy") in {(queue, kind) for queue, kind, _ in steps}


def test_statistics(pools: dict[int, RankPool]) -> None:
    """Bytes that were pushed before the finish began count as hidden. The recorder has the splits."""
    for found in pools[2].run(work.statistics):
        assert found["calls"] == 1
        assert found["bytes_copied"] == found["bytes_overlapped"] == 64 * 16 * 4
        assert "output_splits=[64, 64]; input_splits=[64, 64]" in found["shapes"]
        assert [kind for queue, kind in found["trace"] if queue == "COPY"][:3] == ["wait", "copy", "signal"]

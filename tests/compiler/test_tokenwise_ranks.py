"""ub_overlap.tokenwise on ranks: layers of experts in two halves against eager, and choices by the times of exchanges."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.compiler import rank_tokenwise
from tests.compiler.rank_tokenwise import FORCE, SPLIT
from tests.cost.machine import PLAIN
from tests.harness.profiles import stored, with_exchanges_as_pushes
from tests.harness.ranks import RankPool


def check_example(found: rank_tokenwise.Found, exchanges: tuple[int, int]) -> None:
    """Rows are exact up to a rounding of bf16; gradients of experts are sums of two parts in bf16."""
    bad = {name: e for name, e in found.errors.items() if e > (1e-3 if name.endswith(("out", "x.grad", "no_grad")) else 3e-2)}
    assert not bad and len(found.errors) >= 9, found.errors
    assert set(found.exchanges) == set(exchanges)


@pytest.mark.tier("full")
def test_the_example(pool2: RankPool) -> None:
    """Counts, dispatch and combine of each half; without gradients too."""
    for found in pool2.run(rank_tokenwise.compare_example, [24], FORCE):
        check_example(found, (6, 4))
        assert found.forms == ["two halves along dim 0 of tokens [24x32]; split_tokens='force'"]


@pytest.mark.tier("full")
def test_the_example_with_dynamic_sizes(pool2: RankPool) -> None:
    """One graph for two odd numbers of tokens."""
    for found in pool2.run(rank_tokenwise.compare_example, [25, 31], FORCE, True):
        check_example(found, (6, 4))
        assert len(found.exchanges) <= 3  # forward, backward, and forward without gradients


@pytest.mark.tier("full")
def test_the_example_stays_whole(pool2: RankPool) -> None:
    """It is small. Both ranks predict the same."""
    options = {"inner": "aot_eager", "profile": "h200", "min_bytes": 0}
    outcomes = pool2.run(rank_tokenwise.compare_example, [24], options)
    for found in outcomes:
        check_example(found, (3, 2))
        assert found.forms[0].startswith("whole of tokens [24x32]; predicted us: whole ")
    assert outcomes[0].forms == outcomes[1].forms


@pytest.mark.tier("full")
@pytest.mark.parametrize("variant", [{"routing": "one"}, {"form": "loop", "routing": "skewed", "tokens": (25, 24)}])
def test_split_exchanges(pool2: RankPool, variant: dict[str, Any]) -> None:
    """All rows for the first experts, so that others are empty; loops over experts, and ranks with other numbers of tokens."""
    for outcome, forms in pool2.run(rank_tokenwise.compare_split, variant):
        outcome.check(3.0)
        found = [(d["phase"], d["strategy"]) for d in outcome.decisions if d["kind"] == "all_to_all"]
        assert sorted(found) == [("backward", "split")] * 4 + [("forward", "none")] * 2 + [("forward", "split")] * 4
        assert "two halves" in forms[0]


@pytest.mark.tier("full")
def test_inductor(pool2: RankPool) -> None:
    options = {**SPLIT, "inner": "inductor"}
    for outcome, forms in pool2.run(rank_tokenwise.compare_split, {}, options, timeout=380):
        outcome.check(3.0)
        assert sum(d["strategy"] == "split" for d in outcome.decisions) == 8 and "two halves" in forms[0]


@pytest.fixture(scope="module")
def slow_profile() -> str:
    """Return a profile in which a matmul of experts takes 1700 us, an exchange 2700 us, and a launch nothing."""
    compute = replace(PLAIN.compute, tflops={"bfloat16": 2.4e-3}, launch_us=0.0)
    key = {**PLAIN.key, "device": "cpu"}  # on a GPU tiles are padded
    slow = replace(PLAIN, name="slow", key=key, compute=compute, push=((8, 1.0), (8e6, 2.6e6)))
    return stored(with_exchanges_as_pushes(slow))


@pytest.mark.tier("full")
def test_auto_in_halves(pool2: RankPool, slow_profile: str) -> None:
    """Halves are predicted to be faster. The dispatch of the second one is in flight while the experts of the first one run."""
    options = {"profile": slow_profile, "min_bytes": 0, "inner": "aot_eager"}
    outcomes = pool2.run(rank_tokenwise.compare_split, {"shared": False, "tokens": (256,)}, options)
    for outcome, forms in outcomes:
        outcome.check(3.0)
        assert forms[0].startswith("two halves along dim 0 of tokens [256x16]; predicted us: whole "), forms
        forward = [d for d in outcome.decisions if d["phase"] == "forward"]
        assert [d["dtype"] for d in forward] == ["int64"] * 2 + ["bfloat16"] * 4
        assert all("grouped_mm" in "".join(d["paired"]) for d in forward[3:5]), forward
    assert outcomes[0][1] == outcomes[1][1]


def test_ranks_with_other_forms(pool2: RankPool) -> None:
    """A rank with one token does not cut it: an error that says so, and no deadlock."""
    for found in pool2.run(rank_tokenwise.compile_unlike, (24, 1)):
        assert found["error"] == "PlanMismatchError", found


@pytest.mark.tier("full")
def test_hosts_decide(pool2: RankPool) -> None:
    """Within a host the exchanges are short. Across hosts half of the layer hides the exchanges of the other half."""
    within, across = (pool2.run(rank_tokenwise.choose_on, hosts) for hosts in ("", "1"))
    assert within[0] == within[1] and across[0] == across[1]
    (dim, whole, halves), (dim_across, whole_across, halves_across) = within[0], across[0]
    assert dim == -1 and dim_across == 0
    assert whole * 0.97 <= halves and halves_across < whole_across * 0.97
    assert whole_across > whole


@pytest.mark.tier("full")
@pytest.mark.parametrize(
    ("kind", "tokens", "dim"), [("mixtral", (1, 13), 1), ("qwen3_moe", (2, 6), 0), ("deepseek_v3", (3, 5), 0)]
)
def test_blocks_of_transformers(hf2: RankPool, kind: str, tokens: tuple[int, int], dim: int) -> None:
    """Float32, [B, S, D]."""
    for outcome, forms in hf2.run(rank_tokenwise.compare_split, {"kind": kind, "tokens": tokens}):
        outcome.check()
        assert forms == [f"two halves along dim {dim} of tokens [{tokens[0]}x{tokens[1]}x32]; split_tokens='force'"]
        assert [d["strategy"] for d in outcome.decisions].count("split") == 8

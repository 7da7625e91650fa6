"""Fused collectives in graphs: what follows a reduction becomes part of the op, where that is legal."""

from __future__ import annotations

from typing import Any

import pytest

from tests.compiler import rank_fused
from tests.compiler.fused_forms import FORMS
from tests.harness.ranks import RankPool
from tests.harness.tiers import INNER

NORMS = {"rms": "RMSNorm", "layer": "LayerNorm"}


def parts_of(name: str) -> str:
    """Return what the report says is one kernel with the collective of a form."""
    wanted = FORMS[name]
    parts = [f"{NORMS[step]} of the branch" if step in NORMS else step for step in wanted.branch]
    parts += [*(["the residual"] if wanted.residual else []), *([NORMS[wanted.norm]] if wanted.norm != "none" else [])]
    return f"one kernel with {', '.join(parts[:-1])}{' and ' if parts[1:] else ''}{parts[-1]}" if parts else ""


def check(found: dict[str, Any]) -> None:
    """The compiled results are as far from float64 as eager's, up to the order of sums."""
    assert all(found["same"]), found
    for far, plain in zip(found["far"], found["plain"], strict=True):
        assert far <= 1.5 * plain + 1e-5, found


@pytest.mark.parametrize("name", FORMS)
def test_what_is_fused(pool2: RankPool, name: str) -> None:
    for found in pool2.run(rank_fused.run_form, name, "one_shot", "aot_eager"):
        check(found)
        assert found["strategies"] == ["one_shot"], found
        (detail,) = found["details"]
        wanted = parts_of(name)
        parts = [part for part in detail.split("; ") if part.startswith("one kernel")]
        assert parts == ([wanted] if wanted else []), detail


@pytest.mark.parametrize("strategy", ["two_shot", "3=one_shot;*=two_shot", "one_shot|none"])
def test_other_strategies(pool2: RankPool, strategy: str) -> None:
    for found in pool2.run(rank_fused.run_form, "llama", strategy, "aot_eager", False):
        check(found)
        assert found["strategies"] == [strategy], found


def test_sums_in_fp32_are_fused_where_all_is(pool2: RankPool) -> None:
    for found in pool2.run(rank_fused.run_form, "vllm", "one_shot", "aot_eager", False):
        check(found)
        assert "one kernel with the residual and RMSNorm" in found["details"][0], found


@pytest.mark.parametrize("inner", INNER)
def test_residuals_of_residuals(pool2: RankPool, inner: str) -> None:
    """Each sum is the residual of the next, and each norm but the first is part of an op."""
    for found in pool2.run(rank_fused.run_form, "two_layers", "one_shot", inner):
        check(found)
        assert found["strategies"] == ["one_shot"] * 4
        assert all("one kernel with the residual and RMSNorm" in detail for detail in found["details"])


@pytest.mark.parametrize("options", [{"overrides": [{"strategy": "one_shot"}]}, {"profile": "h200"}])
def test_two_results_of_one_sum(pool2: RankPool, options: dict[str, Any]) -> None:
    """A sum of two collectives is part of one of their ops; the other is an op alone."""
    for found in pool2.run(rank_fused.run_unmerged, options):
        check(found)
        assert found["strategies"] == ["one_shot", "one_shot"], found
        assert sorted("the residual" in detail for detail in found["details"]) == [False, True], found


def test_two_norms_in_front_of_one_residual(pool2: RankPool) -> None:
    """One op has the sums. The other keeps its norm."""
    for found in pool2.run(rank_fused.run_form, "two_post_norms", "one_shot", "aot_eager"):
        check(found)
        parts = sorted(p for d in found["details"] for p in d.split("; ") if p.startswith("one kernel"))
        assert parts == ["one kernel with RMSNorm", "one kernel with RMSNorm of the branch, the addend and the residual"], found


@pytest.mark.parametrize("name", ["gathered", "scattered"])
def test_two_shot_is_a_strategy_of_all_reduces(pool2: RankPool, name: str) -> None:
    for found in pool2.run(rank_fused.run_form, name, "two_shot", "aot_eager"):
        check(found)
        assert found["strategies"] == ["none"]
        assert "two_shot is a strategy of all_reduces" in found["details"][0]


@pytest.mark.parametrize(
    ("name", "parts"), [("cohere_block", "the residual"), ("parallel_biases", "the linear bias, the residual")]
)
def test_a_parallel_block_on_a_residual(pool2: RankPool, name: str, parts: str) -> None:
    """Its two reductions are one, with biases, residual and norm."""
    for found in pool2.run(rank_fused.run_form, name, "one_shot", "aot_eager", False):
        check(found)
        assert found["strategies"] == ["one_shot", "merged"]
        assert f"one kernel with {parts} and LayerNorm" in found["details"][0]


def test_rounding_is_kept(pool2: RankPool) -> None:
    """A bias that is added behind the rounding stays behind it: the bits are eager's."""
    for found in pool2.run(rank_fused.run_form, "narrow_bias", "one_shot", "aot_eager"):
        assert found["far"] == found["plain"], found


def test_a_rank_gets_whole_vectors(pool2: RankPool) -> None:
    for found in pool2.run(rank_fused.run_form, "vector", "one_shot", "aot_eager"):
        check(found)
        assert found["strategies"] == ["none"]
        assert "no multiple of 16 bytes" in found["details"][0]

"""Expert parallelism: a layer of experts whose exchanges are split, against the plain layer and float64.

Routes differ by rank, one expert or one rank gets all rows, a rank has no tokens, and layers run in two halves of their tokens.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from tests.compiler import rank_tokenwise
from tests.gpu.lockstep import Lockstep
from tests.models.compare import Comparison, compare
from ub_overlap.runtime.session import session

SPLIT: dict[str, Any] = {"overrides": [{"kind": "all_to_all", "strategy": "split"}]}
HALVES: dict[str, Any] = {**SPLIT, "split_tokens": "force"}
TOKENS = 24
INDUCTOR = ("skewed", "no tokens")
"""Variants that Inductor compiles on GPUs."""
LONG = ("even", "one expert in a loop", "with sharded weights")
"""Left out with --quick."""
VARIANTS: dict[str, dict[str, Any]] = {
    "skewed": {"routing": "skewed"},
    "even": {"routing": "even"},
    "one expert": {"routing": "one", "k": 1},
    "one rank": {"routing": "one"},
    "loop": {"routing": "skewed", "form": "loop"},
    "one expert in a loop": {"routing": "one", "k": 1, "form": "loop"},
    "no tokens": {"shared": False, "empty": True},
    "with tensor parallelism": {"other": "tp"},
    "with sharded weights": {"other": "fsdp"},
}


def variant_of(name: str, ranks: int) -> dict[str, Any]:
    """Return the arguments of tests.models.moe.build. "empty": the last rank has no tokens, and others have other numbers."""
    variant = dict(VARIANTS[name])
    tokens = tuple(TOKENS + 2 * rank for rank in range(ranks - 1)) + (0,) if variant.pop("empty", False) else (TOKENS,) * ranks
    return {**variant, "tokens": tokens}


def options_of(lockstep: Lockstep, options: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the options of a variant."""
    return options if lockstep.cuda and name in INDUCTOR else {**options, "inner": "aot_eager"}


def named(*names: str) -> list[Any]:
    """Return variants as parameters of a test."""
    return [pytest.param(name, marks=pytest.mark.full if name in LONG else []) for name in names]


def check(lockstep: Lockstep, found: Comparison, exchanges: Counter[tuple[str, str]]) -> str:
    """AssertionError for results further from float64 than plain ones, and for other decisions. Return a summary."""
    lockstep.sync()
    session.check()
    found.check(3.0)
    seen = Counter((d["phase"], d["strategy"]) for d in found.decisions if d["kind"] == "all_to_all")
    assert seen == exchanges, f"{dict(seen)}, expected {dict(exchanges)}"
    worst = max(pair[1] for pair in found.errors.values())
    return f"{seen.total()} exchanges, error {worst:.1e}, plain {max(pair[0] for pair in found.errors.values()):.1e}"


@pytest.mark.deadline(120)
@pytest.mark.parametrize("name", named(*VARIANTS))
def test_layer(lockstep: Lockstep, name: str) -> None:
    """Dispatch and combine are split, in both directions. Counts of tokens stay a plain exchange of int64.

    On the CPU nothing is fused, and results are as far from float64 as the plain layer's.
    """
    if name == "with sharded weights" and 16 % lockstep.ranks:
        pytest.skip(f"weights of 16 rows do not divide by {lockstep.ranks} ranks")
    torch._dynamo.reset()
    has_tensor_parallelism = name == "with tensor parallelism"
    fused = {"overlap": "force", "min_bytes": 0} if has_tensor_parallelism else {}
    options = options_of(lockstep, SPLIT | fused, name)
    variant = variant_of(name, lockstep.ranks)
    found = compare(lockstep.rank, lockstep.ranks, "tests.models.moe", variant, options, device=lockstep.device)
    exchanges = Counter({("forward", "none"): 1, ("forward", "split"): 2, ("backward", "split"): 2})
    lockstep.note(check(lockstep, found, exchanges))
    if has_tensor_parallelism:
        others = [(d["kind"], d["strategy"]) for d in found.decisions if d["kind"] != "all_to_all"]
        assert len(others) == 4 and all(strategy.partition(":")[0] in ("pipelined", "direct") for _, strategy in others), others
    unlike = [what for what, (plain, ours) in found.errors.items() if plain != ours]
    assert lockstep.cuda or not unlike, unlike


@pytest.mark.deadline(150)
@pytest.mark.parametrize("name", ["skewed", "one expert", "loop"])
def test_tokenwise(lockstep: Lockstep, name: str) -> None:
    """The layer runs in two halves of its tokens, each with exchanges of its own."""
    torch._dynamo.reset()
    options = options_of(lockstep, HALVES, name)
    variant = {"kind": "moe", **variant_of(name, lockstep.ranks)}
    found, forms = rank_tokenwise.compare_split(lockstep.rank, lockstep.ranks, variant, options, device=lockstep.device)
    assert forms == [f"two halves along dim 0 of tokens [{TOKENS}x16]; split_tokens='force'"], forms
    exchanges = Counter({("forward", "none"): 2, ("forward", "split"): 4, ("backward", "split"): 4})
    lockstep.note(check(lockstep, found, exchanges))

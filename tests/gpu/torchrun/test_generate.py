"""Greedy generation of a transformers Llama under mode="reduce-overhead": the tokens of the plain model."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from tests.gpu.lockstep import Lockstep
from tests.models import rank_generate
from tests.models.case import on
from ub_overlap.runtime.session import session


@pytest.mark.deadline(280)
@pytest.mark.parametrize(("mode", "batches"), [("reduce-overhead", {"static": 5}), (None, {"static": 1, "dynamic": 2})])
def test_tokens_are_the_same(lockstep: Lockstep, mode: str | None, batches: dict[str, int]) -> None:
    """Every all_reduce is one kernel. A dynamic cache keeps results of a step, which CUDA graphs overwrite.

    Ranks that share a GPU use no graphs: the gather of logits stays a collective of c10d, which gloo cannot capture.
    """
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    options: dict[str, Any] = {"profile": "h200"}
    if lockstep.ranks != 2:  # the profile has measured 2 ranks, so it weighs others with a larger margin
        options["overrides"] = [{"strategy": "one_shot", "kind": "all_reduce"}]
    if not lockstep.cuda:
        options["inner"] = "aot_eager"
    elif mode and not lockstep.shares_gpu:
        options["mode"] = mode
    with on(lockstep.device):
        found = rank_generate.run(lockstep.rank, lockstep.ranks, batches, 12, options)
    lockstep.sync()
    session.check()
    for cache, run in found.items():
        assert run["tokens"] == run["expected"], cache
        strategies = [strategy for graph in run["graphs"] for kind, strategy, _ in graph if "all_reduce" in kind]
        assert strategies and all("one_shot" in strategy for strategy in strategies), strategies
    lockstep.note(f"{sum(len(run['graphs']) for run in found.values())} graphs")

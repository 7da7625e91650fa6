"""Layers of transformers' families with few tokens on 2 CPU ranks: what follows a reduction is one kernel with it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness.ranks import RankPool
from tests.models import rank_families

pytestmark = pytest.mark.tier("full")

FAMILIES: dict[str, tuple[list[str], int, str]] = {
    "gemma2": (["one_shot"] * 3, 2, "RMSNorm of the branch, the residual and RMSNorm"),
    "glm4": (["one_shot"] * 3, 2, "RMSNorm of the branch, the residual and RMSNorm"),
    "olmo2": (["one_shot"] * 3, 2, "RMSNorm of the branch"),
    "granite": (["one_shot"] * 3, 2, "the factor 0.22, the residual and RMSNorm"),
    "starcoder2": (["one_shot"] * 3, 2, "the linear bias, the residual and LayerNorm"),
    "phi": (["one_shot", "one_shot", "merged"], 1, "the linear bias, the residual and LayerNorm"),
    "qwen2_moe": (["one_shot"] * 3, 1, "the addend, the residual and RMSNorm"),
    "ernie4_5_moe": (["one_shot"] * 3 + ["merged"], 2, "the residual and RMSNorm"),
    "gpt_neox": (["one_shot", "merged"], 1, "the linear bias, the residual and LayerNorm"),
}
"""By name: the strategies of the reductions, the embedding's first; how many kernels a layer has; what is one with each."""


@pytest.mark.timeout(600)
def test_families() -> None:
    pytest.importorskip("transformers")
    options: dict[str, Any] = {"overrides": [{"kind": "all_reduce", "strategy": "one_shot"}], "inner": "aot_eager"}
    with RankPool(2) as pool:  # ranks of their own: torchtitan cannot be imported after transformers
        for name, (strategies, kernels, parts) in FAMILIES.items():
            for found in pool.run(rank_families.run, name, options):
                assert found["error"] < 1e-5, (name, found)
                reductions = [(s, detail) for kind, s, detail in found["decisions"] if kind != "all_gather"]
                assert [s for s, _ in reductions] == strategies, (name, found)
                fused = [detail for s, detail in reductions if s == "one_shot"]
                assert all(parts in detail for detail in fused[-kernels:]), (name, found)


def test_a_mixture_of_experts_is_one_graph() -> None:
    """Forward and backward of Qwen 3 MoE: every collective is overlapped, or merged into one that is."""
    pytest.importorskip("transformers")
    with RankPool(2) as pool:
        for found in pool.run(rank_families.train_experts):
            assert found["error"] < 1e-4 and len(found["strategies"]) > 4 and "none" not in found["strategies"], found

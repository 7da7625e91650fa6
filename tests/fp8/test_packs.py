"""Packed operands in float8: matmuls of one gather as one, with the bits of the matmuls apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.fp8.rank_fp8 import NO_ROWS
from tests.fp8.rank_packs import CASES, FORCE, ROWWISE, run_case, run_model, run_saved, run_steps, verified
from tests.harness.fake_ranks import FakeRanks
from tests.harness.ranks import RankPool
from tests.harness.tiers import full_but, in_full

pytestmark = NO_ROWS
LLAMA, BF16 = "tests.models.dtensor_llama", torch.bfloat16
INDUCTOR: dict[str, Any] = {"overlap": "force", "fp8": {"recipe": "rowwise"}}


@pytest.mark.parametrize("name", CASES)
def test_cases(pool2: RankPool, name: str) -> None:
    """Outputs are those of the matmuls apart, whatever reads the parts; look-alikes are not packed."""
    for differ, packs, details in pool2.run(run_case, name, FORCE):
        assert (differ, packs) == ([], CASES[name][2])
        assert all(detail.startswith(CASES[name][3]) for detail in details), details


@pytest.mark.tier("full")
@pytest.mark.parametrize("name", ["parts", "biases", "flattened"])
def test_inductor(pool2: RankPool, name: str) -> None:
    for differ, packs, _ in pool2.run(run_case, name, {"overlap": "force"}):
        assert (differ, packs) == ([], CASES[name][2])


@pytest.mark.parametrize(
    ("variant", "options"),
    [
        ({}, {}),
        *map(in_full, [({"kv_heads": 4, "layers": 2}, {}), ({"bias": True}, {}), ({"each": True}, {})]),
        in_full(({}, {"fp8": {"recipe": "rowwise", "weights": "per_call"}})),
    ],
    ids=["block", "two blocks", "biases", "a gather each", "per call"],
)
def test_models(pool2: RankPool, variant: dict[str, Any], options: dict[str, Any]) -> None:
    """Outputs and gradients are those of the matmuls apart: q, k, v and w1, w3 are one matmul each. Sums stay apart."""
    for run in pool2.run(run_model, LLAMA, {"dtype": BF16, **variant}, {**ROWWISE, **options}):
        assert run.differ == []
        assert [d.packs for d in run.gathers()] == [(3,), (2,)] * variant.get("layers", 1)
        is_copied = options.get("fp8", {}).get("weights") == "per_call"
        assert all(bool(d.pack_bytes) == is_copied for d in run.gathers()), "cached casts lie next to each other"
        sums = [d for p in run.packed for d in p.decisions if d.phase == "backward" and len(d.matmuls) > 1]
        assert sums and all(d.packs == () and "each term of a float8 sum" in d.detail for d in sums)
        assert run.packed[0].shared_digest != run.apart[0].shared_digest


@pytest.mark.tier("full")
def test_torchao(pool2: RankPool) -> None:
    """w1 and w3 of a program that is float8 already. Its weight gradients in 16 bits are packed too, its sums are not."""
    for run in pool2.run(run_model, "tests.models.torchao_mlp", {"recipe": "rowwise_with_gw_hp", "gather_fp8": False}, FORCE):
        assert run.differ == [] and [d.packs for d in run.gathers()] == [(2,)]
        gradients = [d for d in run.gathers("backward") if len(d.matmuls) > 1]
        assert [(d.packs, d.work.dtype) for d in gradients if d.work] == [((2,), "bfloat16")]
        assert {d.packs for p in run.packed for d in p.decisions if d.kind.value == "matmul_reduce_scatter"} == {()}


@pytest.mark.tier("full")
def test_four_ranks(pool4: RankPool) -> None:
    for run in pool4.run(run_steps, ROWWISE):
        assert run.differ == [] and all(d.packs == (3,) for d in run.gathers())


@pytest.mark.tier("full")
def test_block_inductor(pool2: RankPool) -> None:
    """Kernels that read slices round a few elements to the next step."""
    for run in pool2.run(run_model, LLAMA, {"dtype": BF16}, INDUCTOR):
        assert run.worst < 0.05 and [d.packs for d in run.gathers()] == [(3,), (2,)]


@pytest.mark.tier("full")
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_one_scale_for_each_tensor(pool2: RankPool, recipe: str) -> None:
    for run in pool2.run(run_model, LLAMA, {"dtype": BF16}, {**FORCE, "fp8": {"recipe": recipe, "state": "packs"}}):
        assert all(d.packs == () and "each operand has one scale" in d.detail for d in run.gathers())


@pytest.mark.parametrize("is_checkpointed", full_but([True], [False, True]))
def test_steps(pool2: RankPool, is_checkpointed: bool) -> None:
    """Cached casts follow the weights through optimizer steps, microbatches, swapped weights and checkpoints."""
    for run in pool2.run(run_steps, ROWWISE, is_checkpointed):
        assert run.differ == [] and all(d.packs == (3,) for d in run.gathers())


def test_verify(pool2: RankPool) -> None:
    for sites in pool2.run(verified):
        ((packs, error),) = sites
        assert packs == (3,) and error is not None and error < 1e-5


@pytest.mark.tier("test")
def test_saved_plans(fake2: FakeRanks) -> None:
    """A saved plan packs what it packed. "off" still packs nothing."""
    for found in fake2.run(run_saved):
        assert found == [[[3]], [[3]], [[]], [[]], [[]], [[]]]

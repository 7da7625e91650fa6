"""Packed operands: matmuls of one site as one, against eager, float64 and the op on joined operands."""

from __future__ import annotations

from typing import Any

import pytest

from tests.compiler.rank_compile import FORCE, INDUCTOR, check
from tests.compiler.rank_packs import (
    CASES,
    PACK,
    M,
    run_by_hand,
    run_case,
    run_chains,
    run_microbatches,
    run_saved,
    saved_bytes,
)
from tests.diff.test_verify import verified
from tests.harness.fake_ranks import FakeRanks
from tests.harness.ranks import RankPool
from tests.harness.tiers import full_but
from tests.models.catalogue import DTENSOR, MEGATRON, joined
from tests.models.compare import compare

MODELS = joined(DTENSOR, MEGATRON)
PACK_INDUCTOR: dict[str, Any] = {**INDUCTOR, "pack": "force"}
SEEDS = 16


@pytest.mark.parametrize("name", CASES)
def test_cases(pool2: RankPool, name: str) -> None:
    """Values and strides of all outputs are eager's, whatever reads the parts; look-alikes are not packed."""
    for differ, strides, packs in pool2.run(run_case, name, PACK):
        assert (differ, strides, packs) == ([], [], CASES[name][2])


INDUCTOR_CASES = ["complex pairs", "flattened", "heads", "strict readers", "written", "rows of results", "views of views"]


@pytest.mark.tier("full")
@pytest.mark.parametrize("name", INDUCTOR_CASES)
def test_inductor(pool2: RankPool, name: str) -> None:
    for differ, strides, packs in pool2.run(run_case, name, PACK_INDUCTOR):
        assert (differ, strides, packs) == ([], [], CASES[name][2])


PACKED = ["llama_b2", "llama_bias_b1", "llama_gqa_two_blocks", "llama_reduce", "mlp_gated_bias"]


@pytest.mark.parametrize("name", full_but(["mlp_gated_bias"], PACKED))
def test_models(pool2: RankPool, name: str) -> None:
    """Models are as near to float64 as eager. Every gather and every sum of several matmuls is one matmul."""
    for outcome in check(pool2, *MODELS[name], PACK):
        packed = [d for d in outcome.decisions if d["packs"]]
        assert {d["kind"] for d in packed if d["phase"] == "backward"} <= {"matmul_reduce_scatter", "matmul_all_reduce"}
        assert all(d["pack_bytes"] and "pack='force'" in d["detail"] for d in packed)
        several = [d for d in outcome.decisions if len(d["matmuls"]) > 1 and d["kind"] != "all_gather_matmul"]
        assert several and all(d["packs"] == [len(d["matmuls"])] for d in several)


@pytest.mark.tier("full")
def test_gathered_again(pool2: RankPool) -> None:
    """A tensor that backward gathers again is multiplied once for all weight gradients."""
    outcomes = pool2.run(compare, *MODELS["llama_gqa_two_blocks"], {**PACK, "memory_budget": 0})
    for outcome in outcomes:
        outcome.check()
        gathers = [d for d in outcome.decisions if d["phase"] == "backward" and d["kind"] == "all_gather_matmul"]
        assert sorted(d["packs"] for d in gathers if d["packs"]) == [[2], [2], [3], [3]]


@pytest.mark.tier("full")
def test_block_inductor(pool2: RankPool) -> None:
    check(pool2, *MODELS["llama_bias_b1"], PACK_INDUCTOR)


@pytest.mark.tier("full")
def test_saved_parts(pool2: RankPool) -> None:
    """Saved parts share their result where it is mostly saved. A small saved part does not keep all of it alive."""
    for mostly, hardly in pool2.run(saved_bytes, PACK_INDUCTOR):
        rows = 2 * M * 4
        assert (mostly, hardly) == ([rows * (8 + 4 + 4)], [rows * 4])


def test_dynamic(pool2: RankPool) -> None:
    check(pool2, *MODELS["mlp_dynamic_dim1"], PACK)


@pytest.mark.tier("full")
def test_chains(pool2: RankPool) -> None:
    for wrong, packed in pool2.run(run_chains, list(range(SEEDS))):
        assert not wrong, "\n".join(wrong)
        assert packed >= SEEDS // 2


@pytest.mark.parametrize("to_none", [True, False])
def test_microbatches(pool2: RankPool, to_none: bool) -> None:
    """Gradients that are parts of one result accumulate as gradients of their own."""
    assert pool2.run(run_microbatches, to_none, {**PACK, "memory_budget": 0}) == [[], []]


def test_the_bits_of_the_op(pool2: RankPool) -> None:
    assert all(pool2.run(run_by_hand))


@pytest.mark.tier("full")
def test_verify(pool2: RankPool) -> None:
    model = ("tests.models.dtensor_llama", {"kv_heads": 4})
    for sites, _, worst in pool2.run(verified, model, PACK):
        assert sites and all(error is not None and error < 1e-4 for _, _, error in sites) and worst < 1e-3


@pytest.mark.parametrize("pack", ["auto", "force", "off"])
def test_direct_packs_a_sum(pool2: RankPool, pack: str) -> None:
    """A sum of matmuls that is forced to run by direct becomes one matmul. It runs apart where packs are off."""
    options = {**FORCE, "pack": pack, "overrides": [{"strategy": "direct"}]}
    for differ, strides, packs in pool2.run(run_case, "summed everywhere", options):
        assert (differ, strides, packs) == ([], [], [[] if pack == "off" else [2]])


@pytest.mark.tier("test")
def test_saved_plans(fake2: FakeRanks) -> None:
    """A saved plan packs what it packed. "off" still packs nothing, and a plan without packs leaves them to the option."""
    for found in fake2.run(run_saved):
        assert found == {"packed": [[3], [3], []], "apart": [[], [], []], "older": [[], [3], []]}


def test_off_and_unpredicted(pool2: RankPool) -> None:
    """Without a cost model "auto" packs nothing; "off" also says so."""
    for pack, why in (("off", "pack='off'"), ("auto", "")):
        for outcome in check(pool2, *MODELS["mlp_gated_bias"], {**FORCE, "pack": pack}):
            assert not any(d["packs"] for d in outcome.decisions)
            gathers = [d for d in outcome.decisions if d["phase"] == "forward" and len(d["matmuls"]) > 1]
            assert gathers and all(why in d["detail"] for d in gathers)

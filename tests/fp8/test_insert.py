"""Float8 over ranks: which matmuls, what is sent, what is saved, and that overlap changes no number."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol

from tests.compiler.rank_compile import world_name
from tests.fp8.rank_fp8 import NO_ROWS, RECIPES, ROWS, Run, both, float8, graphs, torchao, torchao_16, wire
from tests.fp8.rank_hoist import graphs as hoist_graphs
from tests.harness.ranks import RankPool
from tests.harness.tiers import INNER, full_but
from tests.models.compare import error, uncached
from ub_overlap.compiler.plan.decision import CastDecision
from ub_overlap.compiler.plan.plan import Plan
from ub_overlap.compiler.plan.reasons import Reason
from ub_overlap.compiler.plan.strategy import Mode
from ub_overlap.compiler.reports.report import Report
from ub_overlap.compiler.reports.summary import format_plan
from ub_overlap.runtime import settings
from ub_overlap.runtime.errors import UbOverlapError

LLAMA, MLP, FSDP = "tests.models.dtensor_llama", "tests.models.dtensor_mlp", "tests.models.fsdp"
BF16 = torch.bfloat16
EAGER: dict[str, Any] = {"inner": "aot_eager", "fp8": "all"}
GW_HP = "rowwise_with_gw_hp"
FLOAT8 = {torch.float8_e4m3fn, torch.float8_e5m2}
ALL = {"forward", "input gradient", "weight gradient"}


def by_role(run: Run) -> Counter[tuple[str, str]]:
    return Counter((c.role, c.recipe or c.reason.value) for c in run.casts if c.recipe or c.reason)  # type: ignore[union-attr]


def same(a: Run, b: Run) -> bool:
    """Return whether two runs agree.

    Sums over ranks are rounded elsewhere, so a few elements fall on the next float8 step: 1/8 of themselves, not of the
    largest.
    """
    return all(error(b.values[n], a.values[n], n) < 0.05 for n in a.values)


@pytest.mark.parametrize("recipe", full_but(RECIPES[1:], RECIPES))
def test_llama(pool2: RankPool, recipe: str) -> None:
    """Seven linears, gathered along dim 1 of two batches: every collective next to one is overlapped, in float8."""
    for off, on in pool2.run(both, LLAMA, {"dtype": BF16}, {**EAGER, "fp8": {"recipe": recipe}}):
        gradient = recipe if recipe == "tensorwise" else Reason.RECIPE.value
        expected = {("forward", recipe): 7, ("input gradient", recipe): 7, ("weight gradient", gradient): 7}
        assert by_role(off) == by_role(on) == expected
        for phase in ("forward", "backward"):
            assert on.kinds(phase) == ["all_gather_matmul"] * 2 + ["matmul_reduce_scatter"] * 2
            assert off.kinds(phase) == []
        gathers = [d for d in on.decisions if d.kind.value == "all_gather_matmul"]
        assert {d.work.dtype for d in gathers if d.work} == {"float8"}
        assert all(d.bytes == 2 * 8 * 64 for d in gathers)  # a shard [2, 8, 64], a byte an element
        assert {d.work.operands for d in on.decisions if d.kind.value == "matmul_reduce_scatter" and d.work} == {"float8"}
        left = [d for d in on.decisions if not d.overlapped]
        if recipe == "tensorwise":
            assert [d.reason for d in left] == [Reason.SCALES] * 4
        else:
            assert [d.strategy.mode for d in left] == [Mode.MERGED] * 4 and all("goes along" in d.detail for d in left)
        assert same(off, on)
        # Right, and really float8: 3 bits of mantissa in, so far less exact than bf16, and no worse than its steps explain.
        assert all(b < 0.2 for _, b in on.errors.values())
        assert on.errors["output0"][1] > 2 * on.errors["output0"][0]


def test_saved_for_backward(pool2: RankPool) -> None:
    """Backward saves the gathered tokens [64, 64] in float8 only, and no cast of a weight: both halves use the cached one."""
    variant = {"dtype": BF16, "length": 32}
    for run in pool2.run(float8, MLP, variant, {**EAGER, "overlap": "force"}):
        assert ((64, 64), torch.float8_e4m3fn) in run.saved
        assert ((64, 64), BF16) not in run.saved and ((2, 32, 64), BF16) not in run.saved
        weights = {(48, 64), (64, 48)}
        assert not {(s, d) for s, d in run.saved if s in weights and d in FLOAT8}
    for run in pool2.run(float8, MLP, variant, {**EAGER, "overlap": "force", "fp8": {"weights": "per_call"}}):
        assert {(s, d) for s, d in run.saved if s in weights and d in FLOAT8} == {(s, torch.float8_e4m3fn) for s in weights}
    rowwise = {**EAGER, "overlap": "force", "fp8": {"recipe": "rowwise"}}
    for run in pool2.run(float8, MLP, variant, rowwise) if ROWS else ():
        assert ((64, 64), torch.float8_e4m3fn) in run.saved and ((64, 64), BF16) not in run.saved


def test_bias_inference_and_batch_of_one(pool2: RankPool) -> None:
    """A bias gradient reads the dequantized gradient; fp8="forward" leaves backward alone but gathers float8 in forward."""
    for run in pool2.run(float8, MLP, {"dtype": BF16, "bias": True, "batch": 1, "length": 32}, {**EAGER, "overlap": "force"}):
        assert run.kinds("forward") == run.kinds("backward") == ["all_gather_matmul", "matmul_reduce_scatter"]
        assert run.errors["down.bias.grad"][1] < 0.05
    options = {"inner": "aot_eager", "fp8": "forward", "overlap": "force"}
    for run in pool2.run(float8, MLP, {"dtype": BF16}, options):
        assert by_role(run) == {
            ("forward", "tensorwise"): 2, ("input gradient", "recipe"): 2, ("weight gradient", "recipe"): 2,
        }  # fmt: skip
        kinds = {d.phase: d.work.dtype for d in run.decisions if d.kind.value == "all_gather_matmul" and d.work}
        assert kinds == {"forward": "float8", "backward": "bfloat16"}


@pytest.mark.parametrize("inner", INNER)
def test_weights_gathered(pool2: RankPool, inner: str) -> None:
    """Sharded weights are quantized before the gather, with one scale for all ranks."""
    for run in pool2.run(float8, FSDP, {"dtype": BF16}, {"inner": inner, "fp8": "all", "overlap": "force", "split": "off"}):
        gathers = [d for d in run.decisions if d.kind.value == "all_gather"]
        assert len(gathers) == 2 and {d.dtype for d in gathers} == {"uint8"}
        assert {d.reason for d in gathers} == {Reason.SCALED_FORM}  # the weight is the right operand
        # 24 rows: their sum, the weight gradient, does not divide by 16.
        assert by_role(run)["weight gradient", Reason.SIZES_NOT_16.value] == 2
        assert all(b < 0.2 for _, b in run.errors.values())


@pytest.mark.parametrize("overlap", ["off", "force"])
def test_uneven_columns(pool3: RankPool, overlap: str) -> None:
    """336, 336 and 334 columns: no rank quantizes before the gather, as the last one cannot."""
    variant = {"dtype": BF16, "length": 48, "hidden": 1006}
    for run in pool3.run(float8, MLP, variant, {**EAGER, "overlap": overlap}):
        assert by_role(run) == {(role, "sizes_not_16"): 2 for role in ALL}
        assert all("hold 334, 336 of the weight" in c.detail for c in run.casts)
        assert len(run.kinds("forward") + run.kinds("backward")) == (4 if overlap == "force" else 0)
        assert all(b < 0.05 for _, b in run.errors.values())


class Only:
    """An fp8 filter with a name for caches."""

    def __init__(self, part: str) -> None:
        self.part, self.key = part, f"only {part}"

    def __call__(self, module: str, shape: tuple[int, int]) -> bool:
        return self.part in module


def test_filter(pool2: RankPool) -> None:
    """w1 stays in bf16 and w3 does not: their shared gather carries bf16, and w3's operand is quantized after it."""
    options = {**EAGER, "overlap": "force", "fp8": {"filter": Only("w3")}}
    for run in pool2.run(float8, LLAMA, {"dtype": BF16}, options):
        assert {c.module.rpartition(".")[2] for c in run.casts if c.recipe} == {"w3"}
        refused = [c for c in run.casts if c.reason is Reason.FILTERED]
        assert len(refused) == 6 * 3 and all("the fp8 filter refuses" in c.detail for c in refused)
        assert any(c.detail.endswith("w1 [48, 64]") for c in refused)  # of this rank, as nn.Linear has it
        assert {d.dtype for d in run.decisions if "all_gather" in d.kind.value} == {"bfloat16"}
        assert all(b < 0.2 for _, b in run.errors.values())


@pytest.mark.tier("full")
def test_float8_graphs(pool2: RankPool) -> None:
    """Hand-written graphs: sites are matched, lookalikes are left alone, numbers are eager's."""
    gather, scatter = "all_gather_matmul", "matmul_reduce_scatter"
    expected = {"several": gather, "dim0": gather, "dim1": gather, "scatter": scatter, "other_forms": gather}
    reasons = {
        "scatter_mixed": "scaled_form", "other_rows": "scaled_form", "not_gathered": "scaled_form", "right": "scaled_form",
        "trimmed": "uneven_shards", "softmax": "reduce_op_unsupported",
    }  # fmt: skip
    for run in pool2.run(graphs):
        only_rows = set() if ROWS else {"other_rows", "not_gathered"}
        assert {name for name, _ in run} == (set(expected) | set(reasons)) - only_rows
        assert not ROWS or {name for name, scaling in run if scaling == "rows"} >= set(expected)
        for (name, scaling), (worst, decisions) in run.items():
            assert worst < 0.01, (name, scaling, worst)
            done = [kind for kind, strategy, _ in decisions if strategy == "pipelined"]
            assert done == ([expected[name]] if name in expected else []), (name, scaling, decisions)
            if name in reasons:
                assert reasons[name] in [reason for _, _, reason in decisions], (name, scaling, decisions)
            if name in ("several", "dim0", "dim1", "other_forms") and scaling == "rows":
                assert ("all_gather", "merged", None) in decisions


@pytest.mark.parametrize(
    "variant", full_but([{}], [{}, {"batch": 1}, {"along": 0, "batch": 4}]), ids=["dim1", "batch1", "dim0"]
)
def test_torchao_gathers_float8(pool2: RankPool, variant: dict[str, Any]) -> None:
    pytest.importorskip("torchao")
    for errors, decisions in pool2.run(torchao, variant, {"overlap": "force", "inner": "aot_eager"}):
        for phase in ("forward", "backward"):
            done = sorted(d.kind.value for d in decisions if d.phase == phase and d.overlapped)
            assert done == ["all_gather_matmul", "matmul_reduce_scatter"]
        left = [d.reason for d in decisions if not d.overlapped]
        assert set(left) == {Reason.SCALES} and len(left) == 6  # x, the weights, h; dy, dh1, dh3
        assert max(errors.values()) < 0.02  # a bf16 rounding of a sum over ranks


@pytest.mark.tier("full")
def test_torchao_gathers_16_bits(pool2: RankPool) -> None:
    """Casts move before the gathers with bitwise equal results, and the gathers are sites."""
    pytest.importorskip("torchao")
    for run in pool2.run(torchao_16, {}):
        assert run.equal
        for phase in ("forward", "backward"):
            assert run.kinds(phase) == ["all_gather_matmul", "matmul_reduce_scatter"]
        gathers = [d for d in run.decisions[0] if d.kind.value == "all_gather_matmul"]
        assert {d.work.dtype for d in gathers if d.work} == {"float8"}
        assert {d.reason for d in run.decisions[0] if not d.overlapped} == {Reason.SCALES}
        assert max(run.errors.values()) < 0.02


@pytest.mark.tier("full")
@NO_ROWS
@pytest.mark.parametrize(
    ("recipe", "variant"),
    [("rowwise", {}), ("rowwise", {"along": 0, "batch": 4}), (GW_HP, {}), (GW_HP, {"batch": 1})],
    ids=["dim1", "dim0", "high-dim1", "high-batch1"],
)
def test_torchao_rowwise(pool2: RankPool, recipe: str, variant: dict[str, Any]) -> None:
    """Rows are gathered as float8 with their scales; scales after a matmul become the matmul's own.

    Weight gradients gather in backward, which saves the shard: float8 by columns, or 16 bits.
    """
    pytest.importorskip("torchao")
    gather, scatter = "all_gather_matmul", "matmul_reduce_scatter"
    for run in pool2.run(torchao_16, {**variant, "recipe": recipe}):
        step, forward = run.decisions
        assert run.equal and max(run.errors.values()) < 0.02  # a bf16 rounding of a sum over ranks
        assert all(ours <= 1.05 * eager + 0.01 for eager, ours in run.exact_errors.values())
        assert run.kinds("forward") == sorted(d.kind.value for d in forward if d.overlapped) == [gather, scatter]
        twice = recipe == GW_HP
        assert run.kinds("backward") == [gather] * (2 if twice else 1) + [scatter]
        types = [d.work.dtype for d in step if d.kind.value == gather and d.work]
        assert types == ["float8", "bfloat16", "bfloat16"] if twice else types == ["float8", "float8"]
        merged = [d.phase for d in step if d.strategy.mode is Mode.MERGED]
        assert merged == (["forward"] if twice else ["forward", "backward"])
        left = Counter(d.reason for d in step if not d.overlapped and d.strategy.mode is not Mode.MERGED)
        assert set(left) == {Reason.SCALES} | (set() if twice else {Reason.SCALED_FORM})
        assert left[Reason.SCALED_FORM] == (0 if twice else 2)  # float8 by columns: of x, and of dy
        assert not any(math.prod(shape) == run.elements for shape, _ in run.saved)  # shards


@pytest.mark.tier("full")
@pytest.mark.parametrize("recipe", ["tensorwise", pytest.param(GW_HP, marks=NO_ROWS)])
def test_torchao_by_inductor(pool2: RankPool, recipe: str) -> None:
    """Fused casts use the amax of all ranks too: no number is further from float64 than eager's."""
    pytest.importorskip("torchao")
    for run in pool2.run(torchao_16, {"recipe": recipe}, "inductor"):
        assert run.kinds("forward") == ["all_gather_matmul", "matmul_reduce_scatter"]
        assert run.kinds("backward") == ["all_gather_matmul"] * (2 if recipe == GW_HP else 1) + ["matmul_reduce_scatter"]
        assert all(ours <= 1.2 * eager + 0.01 for eager, ours in run.exact_errors.values()), run.exact_errors


@NO_ROWS
def test_casts_after_a_gather(pool2: RankPool) -> None:
    """Hand-written graphs: casts that move make a site, lookalikes stay with their reason, numbers are eager's."""
    sites = {"rows": 1, "any_scale": 1, "dim1": 1, "columns": 1, "scaled_after": 1}
    reasons = {
        **dict.fromkeys(
            ("other_order", "two_orders", "square", "transposed_columns", "in_16_bits", "two_formats"), "cast_in_between"
        ),
        **dict.fromkeys(("logged", "smooth", "mask", "watched", "wide"), "cast_in_between"),
        "columns": "scaled_form",
        "scaled_after_any": "scale_not_constant",
    }
    for run in pool2.run(hoist_graphs):
        assert {name for name, _ in run} == set(sites) | set(reasons)
        for (name, dynamic), (equal, difference, decisions) in run.items():
            assert equal and difference < 0.01, (name, dynamic)
            overlapped = sum(d.overlapped and d.strategy.mode is not Mode.MERGED for d in decisions)
            why = reasons.get(name)
            assert overlapped == sites.get(name, 0), (name, dynamic, decisions)
            assert why is None or why in [d.reason.value for d in decisions if d.reason], (name, dynamic, decisions)


def mismatch_error(rank: int, world: int) -> str:
    """Return the error of ranks whose filters differ: the last one leaves `down` in 16 bits.

    Both plans are new to the group: no other test has this length.
    """
    options = {**EAGER, "overlap": "force"} | ({"fp8": {"filter": Only("up")}} if rank else {})
    try:
        float8(rank, world, MLP, {"dtype": BF16, "length": 96}, options)
    except Exception as error:  # noqa: BLE001 (torch may wrap it)
        return f"{type(getattr(error, 'inner_exception', error)).__name__}: {error}"
    return ""


def test_a_product_that_ranks_cast_differently_is_named(pool2: RankPool) -> None:
    for text in pool2.run(mismatch_error):
        assert text.startswith("PlanMismatchError")
        assert "rank 0: float8: forward matmul of 'down' by tensorwise" in text, text
        assert "rank 1: float8: forward matmul of 'down' in 16 bits (filtered: the fp8 filter refuses" in text, text
    pool2.close()  # its group has failed; the next test gets a new pool


def manual_sharding_error(rank: int, world: int) -> str:
    """Return the error for a manually sharded weight whose columns do not divide by 16 on rank 1.

    Rank 1 then joins the all_reduce that rank 0 waits in.
    """
    name, before = world_name(), settings.current().init_timeout_s
    w, message = torch.ones(40 if rank else 48, 64, dtype=BF16), ""
    function = lambda x, w: funcol.all_gather_tensor(x, 0, name) @ w.t()  # noqa: E731
    settings.configure(init_timeout_s=6.0)
    try:
        with torch.no_grad(), uncached():
            torch.compile(function, backend="ub_overlap", options={**EAGER, "overlap": "force"})(
                torch.ones(8, 64, dtype=BF16), w
            )
    except UbOverlapError as failed:
        message = f"{type(failed).__name__}: {failed}"
    finally:
        settings.configure(init_timeout_s=before)
    if rank == 1:
        funcol.wait_tensor(funcol.all_reduce(torch.ones(()), "max", name))
    return message


@pytest.mark.tier("full")
def test_manually_sharded_weight_is_named(pool2: RankPool) -> None:
    """The rank that waits at an op raises first. The other one waits in c10d, and raises afterwards."""
    other, message = pool2.run(manual_sharding_error)
    assert message.startswith(
        "PlanMismatchError: rank 0 of the group compiled another plan than rank 1, and did not reach this op"
    ), message
    assert "rank 0: float8: forward matmul of '' by tensorwise" in message
    assert "rank 1: float8: forward matmul of '' in 16 bits (sizes_not_16: columns 40 do not divide by 16)" in message
    assert other.startswith("PeerFailedError") and "PlanMismatchError" in other, other
    pool2.close()


def test_float8_reduce_scatter(pool2: RankPool) -> None:
    """Each rank sends half of its result [32, 128] as e4m3: an error of 2^-4 of an element, one of two terms."""
    for plain, reduced in pool2.run(wire):
        assert plain <= 2**-8
        assert 2**-8 < reduced <= 2**-4


def test_casts_in_reports() -> None:
    cast = CastDecision(
        node="mm", role="forward", module="a.b", shape="[1, 2] @ [2, 3]", recipe="", reason=Reason.FILTERED, detail="x"
    )
    plan = Plan("forward", (), casts=(cast,))
    assert Plan.from_json(plan.to_json()) == plan and json.loads(plan.to_json())["casts"][0]["reason"] == "filtered"
    assert format_plan(plan).endswith("; float8 0 of 1 products; left in high precision: filtered 1")
    (reported,) = Report([plan]).casts
    assert (reported.node, reported.reason, reported.detail, reported.error) == (cast.node, cast.reason, cast.detail, None)
    other = CastDecision(node="mm", role="forward", module="a.b", shape="[1, 2] @ [2, 3]", recipe="tensorwise")
    assert len({Plan("forward", (), casts=c).shared_digest for c in ((), (cast,), (other,))}) == 3

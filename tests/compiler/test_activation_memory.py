"""Activation memory: backward keeps a gathered tensor, or keeps its shard and overlaps a second gather with matmuls."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.compiler.dags import Dag
from tests.compiler.rank_compile import FORCE, build, saved_sizes, since
from tests.harness.ranks import RankPool
from tests.harness.tiers import INNER, full_but
from tests.harness.traces import as_loss
from tests.models.compare import Values, error, uncached, values
from ub_overlap.compiler.cost.policy import Policy
from ub_overlap.compiler.joint.activation_memory import _within, apply_save_policy
from ub_overlap.compiler.joint.joint_decision import joint_decision
from ub_overlap.compiler.options import parse
from ub_overlap.compiler.plan.decision import Decision, SavedActivation
from ub_overlap.compiler.reports.history import HISTORY

ACTIVATION = ("tests.models.megatron", {"gated": True, "dims": 2})
WEIGHT = ("tests.models.fsdp", {})


@dataclass(frozen=True)
class Saved:
    """Element counts of tensors kept for backward, decisions, and the largest error against eager."""

    sizes: list[int]
    decisions: list[Decision]
    error: float


def difference(ours: Values, eager: Values) -> float:
    return max(error(ours[n], eager[n], n) for n in eager)


def run(rank: int, world: int, module: str, variant: dict[str, Any], options: dict[str, Any]) -> Saved:
    eager_case, case = (build(rank, world, module, variant) for _ in range(2))
    eager = values(eager_case, eager_case.module)
    mark = HISTORY.mark()
    with uncached(), saved_sizes() as sizes:
        ours = values(case, torch.compile(case.module, backend="ub_overlap", options=options))
    return Saved(sizes, [d for p in HISTORY.since(mark) for d in p.decisions], difference(ours, eager))


def backward_gathers(saved: Saved) -> list[Decision]:
    return [d for d in saved.decisions if d.phase == "backward" and d.kind.value.startswith("all_gather")]


@pytest.mark.parametrize(
    ("model", "gathered", "shard", "before", "after"),
    [(ACTIVATION, 2 * 8 * 64, 8 * 64, 1, 2), (WEIGHT, 96 * 64, 48 * 64, 0, 2)],
    ids=["activation", "weight"],
)
@pytest.mark.parametrize("inner", INNER)
def test_shard_is_kept(
    pool2: RankPool, model: tuple[str, dict[str, Any]], gathered: int, shard: int, before: int, after: int, inner: str
) -> None:
    """A zero memory budget keeps the shard instead of the gathered tensor.

    `gathered`, `shard`: elements of the tensor. `before`, `after`: gathers in backward without and with the policy.
    """
    options = {"overlap": "force", "inner": inner}
    for whole, part in zip(
        pool2.run(run, *model, options),
        pool2.run(run, *model, {**options, "memory_budget": 0}),
        strict=True,
    ):
        assert whole.error < 1e-5 and part.error < 1e-5
        assert gathered in whole.sizes and gathered not in part.sizes
        assert shard in part.sizes
        assert sum(part.sizes) < sum(whole.sizes)
        assert (len(backward_gathers(whole)), len(backward_gathers(part))) == (before, after)
        assert all(d.overlapped for d in (*backward_gathers(whole), *backward_gathers(part)))


def test_gathered_again_along_the_contraction(pool2: RankPool) -> None:
    """The activation's second gather feeds the weight gradients: [D, R * rows] @ [R * rows, F / R]."""
    for saved in pool2.run(run, *ACTIVATION, {**FORCE, "memory_budget": 0}):
        products = [[v for k, v in d.shapes if k.startswith("matmul")] for d in backward_gathers(saved)]
        contracted = [[p.split(" @ ")[1].startswith("[16, ") for p in row] for row in products]
        assert sorted(map(sum, contracted)) == [1, 2]


def test_independent_matmuls_hide_no_second_gather_where_they_are_off() -> None:
    """Backward reads the gathered tensor, with no matmul. A second gather is hidden by the input's gradient, or exposed."""
    again_us = {}
    for allowed in ("auto", "off"):
        d = Dag(8)
        x, w, dy = d.input("primals_x", 1024, 8192), d.input("primals_w", 8192, 8192), d.input("tangents_1", 8192, 8192)
        gathered = d.gather(x)
        product, input_gradient = d.mm(gathered, w), d.mm(dy, d.t(w))
        graph = d.output(product, input_gradient, d.call(torch.ops.aten.mul.Tensor, dy, gathered))
        options = parse({"profile": "h200", "memory_budget": 0, "independent_matmuls": allowed}, frozenset())[0]
        assert apply_save_policy(graph, options, Policy.of(options)) == 1
        (gather,) = graph.find_nodes(op="call_function", target=torch.ops._c10d_functional.all_gather_into_tensor.default)
        saved = joint_decision(gather).saved_activation
        assert saved is not None
        again_us[allowed] = saved.again_us
    assert again_us["off"] > 3 * again_us["auto"] > 0


def keep_matmuls(_ctx: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE


class Checkpointed(nn.Module):
    """`inner` under torch.utils.checkpoint, either full or with matmul results kept."""

    def __init__(self, inner: nn.Module, selective: bool) -> None:
        super().__init__()
        self.inner, self.selective = inner, selective

    def forward(self, x: Tensor) -> Tensor:
        if self.selective:
            contexts = functools.partial(create_selective_checkpoint_contexts, keep_matmuls)
            return checkpoint(self.inner, x, use_reentrant=False, context_fn=contexts)
        return checkpoint(self.inner, x, use_reentrant=False)


def run_checkpointed(
    rank: int, world: int, selective: bool, options: dict[str, Any], dtype: torch.dtype = torch.float32
) -> Saved:
    module, variant = ACTIVATION
    eager_case, case = (build(rank, world, module, {**variant, "dtype": dtype}) for _ in range(2))
    as_loss(eager_case.module(*eager_case.inputs)).backward()
    mark = HISTORY.mark()
    with uncached(), saved_sizes() as sizes:
        compiled = torch.compile(Checkpointed(case.module, selective), backend="ub_overlap", options=options)
        as_loss(compiled(*case.inputs)).backward()
    pairs = zip((*case.inputs, *case.module.parameters()), (*eager_case.inputs, *eager_case.module.parameters()), strict=True)
    worst = max(error(a.grad, b.grad, "gradient") for a, b in pairs)
    return Saved(sizes, [d for p in HISTORY.since(mark) for d in p.decisions], worst)


FULL = since((2, 12), "a tensor of the gathered size is kept there next to the user's region, for a reason not found yet")


@pytest.mark.parametrize("selective", [pytest.param(False, marks=FULL), True], ids=["full", "selective"])
@pytest.mark.parametrize("budget", [None, 0])
def test_activation_checkpointing(pool2: RankPool, selective: bool, budget: int | None) -> None:
    """The gather of a user's checkpoint region runs again in backward, and is overlapped there."""
    for saved in pool2.run(run_checkpointed, selective, {**FORCE, "memory_budget": budget}):
        assert saved.error < 1e-5
        kept = [n for n in saved.sizes if n == 2 * 8 * 64]
        assert len(kept) == selective, "the gathered tensor is kept; w2's product has its size"
        forward = [d for d in saved.decisions if d.phase == "forward"]
        assert [d.kind.value for d in forward if d.overlapped] == ["all_gather_matmul", "matmul_reduce_scatter"]
        gathers = backward_gathers(saved)
        assert len(gathers) == 2 and all(d.overlapped for d in gathers)


@FULL
@pytest.mark.parametrize("recipe", full_but(["rowwise"], ["tensorwise", "delayed", "rowwise"]))
def test_a_region_in_float8(pool2: RankPool, recipe: str) -> None:
    """The float8 replacement of a matmul stays in its checkpoint region: gathered tensors and results are not kept."""
    gathered, product = 2 * 8 * 64, 2 * 8 * 48
    for saved in pool2.run(run_checkpointed, False, {**FORCE, "fp8": {"recipe": recipe}}, torch.bfloat16):
        assert saved.error < 0.3
        assert not {gathered, product} & set(saved.sizes), saved.sizes


def options_with(budget: float | None) -> dict[str, Any]:
    return {**FORCE, "profile": "h200", "memory_budget": budget}


def run_budgets(rank: int, world: int, budgets: list[float]) -> list[Saved]:
    """Run one weight-gathering model under each budget, then without one."""
    every = [options_with(b) for b in [*budgets, None]]
    return [run(rank, world, *WEIGHT, options) for options in every]


def test_memory_budget(pool2: RankPool) -> None:
    """Kept bytes stay within the budget.

    Budgets: nothing, a fraction, the bytes of one tensor, everything, and no budget.
    """
    for none, part, some, whole, unlimited in pool2.run(run_budgets, [0.0, 0.5, 96 * 64 * 4 + 1.0, float("inf")]):
        gathers = [[d.kept for d in s.decisions if d.kept is not None] for s in (none, part, some, whole)]
        assert len({len(kept) for kept in gathers}) == 1 and len(gathers[0]) >= 2
        total = sum(k.gathered_bytes for k in gathers[0])
        spent = [sum(k.gathered_bytes for k in kept if k.keeps == "gathered") for kept in gathers]
        assert spent[0] == 0 and 0 < spent[1] <= total / 2 and 0 < spent[2] <= 96 * 64 * 4 + 1 and spent[3] == total
        assert all(s.error < 1e-5 for s in (none, part, some, whole, unlimited))
        bytes_ = [4 * sum(s.sizes) for s in (none, part, some, whole, unlimited)]
        assert bytes_[0] < bytes_[1] < bytes_[3] == bytes_[4] and bytes_[0] < bytes_[2] < bytes_[3]
        for kept in gathers:
            assert all(k.gathered_bytes == 2 * k.shard_bytes and k.again_us >= 0 for k in kept)
        assert not [d for d in unlimited.decisions if d.kept is not None]
        assert all(str(d.kept) in d.detail for s in (none, whole) for d in s.decisions if d.kept)


def test_the_budget_goes_to_what_saves_most_a_byte() -> None:
    kept = [
        SavedActivation("gathered", gathered, gathered // 2, us)
        for gathered, us in [(100, 5.0), (10, 4.0), (60, 30.0), (50, 0.0)]
    ]
    assert _within(kept, 0.0) == set() and _within(kept, 1.0) == _within(kept, float("inf")) == {0, 1, 2, 3}
    assert _within(kept, 0.35) == {1, 2}, "of 220 bytes 77: the third with 0.5 us a byte, the second with 0.4"
    assert _within(kept, 75.0) == {1, 2} and _within(kept, 50.0) == {1} and _within(kept, 60.0) == {2}

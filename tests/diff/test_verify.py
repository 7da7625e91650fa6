"""Tests of options={"verify": True} and UB_OVERLAP_DISABLE."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Node

import ub_overlap
from tests.compiler.rank_compile import FORCE, INDUCTOR, build
from tests.harness.ranks import RankPool
from tests.harness.tiers import in_full
from tests.harness.traces import as_loss
from tests.models.compare import uncached
from ub_overlap.compiler.options import Options, parse
from ub_overlap.compiler.overrides.rule import SiteDescription
from ub_overlap.compiler.plan.decision import Decision
from ub_overlap.compiler.plan.plan import Plan
from ub_overlap.compiler.plan.reasons import Kind
from ub_overlap.compiler.plan.strategy import Mode, Strategy
from ub_overlap.compiler.rewrite import rewrite_graph
from ub_overlap.runtime.verify import TOLERANCE, difference

MODELS = (
    ("tests.models.megatron", {"gated": True, "dims": 3}),
    ("tests.models.dtensor_llama", {}),
    ("tests.models.forms", {"name": "two_reduces"}),
    ("tests.models.forms", {"name": "bulk_gather"}),
)


def verified(rank: int, world: int, model: tuple[str, dict[str, Any]], options: dict[str, Any]) -> tuple[list[Any], str, float]:
    """Return (site, calls, error) per site, the table, and the largest difference from eager outputs and gradients."""
    case = build(rank, world, *model)

    def step(function: Any) -> list[Tensor]:
        loss = as_loss(function(*case.inputs))
        leaves = [t for t in (*case.inputs, *case.module.parameters()) if isinstance(t, Tensor) and t.requires_grad]
        return [loss, *(torch.autograd.grad(loss, leaves) if loss.requires_grad else ())]

    plain = step(case.module)
    with uncached():
        report = ub_overlap.explain(case.module, {**options, "verify": True})(*case.inputs)
        ours = step(torch.compile(case.module, backend="ub_overlap", options={**options, "verify": True}))
    worst = max(float(difference(local(a), local(b))) for a, b in zip(ours, plain, strict=True))
    return [(d.id, d.calls, d.error) for d in report.decisions if d.overlapped], report.table(), worst


def local(t: Any) -> Tensor:
    return t.to_local() if hasattr(t, "to_local") else t


@pytest.mark.parametrize(
    "model",
    [MODELS[0], in_full((MODELS[1],)), *MODELS[2:]],
    ids=lambda m: f"{m[0].split('.')[-1]}-{m[1].get('name', '')}".strip("-"),
)
def test_every_site_is_compared(pool2: RankPool, model: tuple[str, dict[str, Any]]) -> None:
    for sites, table, worst in pool2.run(verified, model, FORCE):
        assert sites and all(error is not None and error < TOLERANCE[torch.float32] for _, _, error in sites), sites
        assert all(calls for _, calls, _ in sites) and "error" in table and worst < 1e-3


@pytest.mark.tier("full")
def test_inductor(pool2: RankPool) -> None:
    for sites, _, worst in pool2.run(verified, MODELS[0], INDUCTOR):
        assert len(sites) == 4 and all(error is not None and error < 1e-4 for _, _, error in sites) and worst < 1e-3


def sabotaged(rank: int, world: int) -> list[Any]:
    """Return the sites of `verified` with a reduction rewrite whose result is wrong by a factor of 1.001."""
    good = rewrite_graph.rewrite_reduction

    def bad(e: Any, *more: Any) -> dict[Node, Node]:
        return {k: e.call(torch.ops.aten.mul.Tensor, v, 1.001) for k, v in good(e, *more).items()}

    rewrite_graph.rewrite_reduction = bad
    try:
        return verified(rank, world, ("tests.models.megatron", {"gated": True, "dims": 2, "local": 24}), FORCE)[0]
    finally:
        rewrite_graph.rewrite_reduction = good


def test_a_wrong_site_is_found(pool2: RankPool) -> None:
    for sites in pool2.run(sabotaged):
        bad = {site for site, _, error in sites if error > TOLERANCE[torch.float32]}
        assert bad == {"forward.1", "backward.1"}


@pytest.mark.parametrize(
    ("ours", "plain", "error"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0), ([1.0, 3.0], [1.0, 2.0], 0.5), ([math.nan, 1.0], [math.nan, 1.0], 0.0),
        ([math.nan, 1.0], [1.0, 1.0], math.inf), ([1.0], [math.inf], math.inf), ([math.inf], [math.inf], 0.0), ([], [], 0.0),
        ([1e-3], [0.0], math.inf),
    ],
)  # fmt: skip
def test_difference(ours: list[float], plain: list[float], error: float) -> None:
    found = float(difference(torch.tensor(ours), torch.tensor(plain)))
    assert found == error or (error == math.inf and found > 1e30)


def requested(options: Options, *ids: str) -> dict[str, str]:
    """Return the requested strategies of sites of one phase."""
    sites = [
        SiteDescription(id=i, phase=i.split(".")[0], kinds=("all_gather", "all_gather_matmul"), modules=(), ranks=0)
        for i in ids
    ]
    return {i: str(o.strategy) for i, o in options.overrides.find(sites[0].phase, sites).items()}


def test_disabled_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UB_OVERLAP_DISABLE", "forward.1, backward.*")
    options, _ = parse({"overrides": {"*": "pipelined"}}, frozenset())
    assert requested(options, "forward.0", "forward.1") == {"forward.0": "pipelined", "forward.1": "none"}
    assert requested(options, "backward.7") == {"backward.7": "none"}
    sites = tuple(
        Decision(id=f"forward.{i}", kind=Kind.ALL_GATHER_MATMUL, phase="forward", strategy=Strategy(Mode.PIPELINED))
        for i in range(2)
    )
    saved, _ = parse({"overrides": Plan("forward", sites)}, frozenset())
    assert requested(saved, "forward.0", "forward.1") == {"forward.0": "pipelined", "forward.1": "none"}
    assert options.key() != parse({"overrides": {"*": "pipelined"}, "verify": True}, frozenset())[0].key()

"""Sites that run by direct: selected by a profile that has its times, and timed against the others by autotune."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from tests.harness.ranks import RankPool
from tests.harness.tiers import full_but
from tests.models.compare import uncached
from tests.runtime.oracle import data
from ub_overlap.compiler.cost import load
from ub_overlap.compiler.cost.profile import DirectStores
from ub_overlap.compiler.plan.plan import Plan
from ub_overlap.compiler.reports.history import HISTORY
from ub_overlap.compiler.reports.report import Report
from ub_overlap.runtime import autotune
from ub_overlap.runtime.site_id import SiteId
from ub_overlap.runtime.stats import site_stats

MODES = ("reduce_scatter", "all_reduce")


def profile_with(path: Path, us: float) -> str:
    """Write the CPU profile with one measured direct matmul of 2 ranks that took `us`. Return its path."""
    direct = DirectStores(1e5, (("bfloat16", 2, 512, 256, 256, us),))
    path.write_text(replace(load("cpu"), direct=direct).to_json())
    return str(path)


def run(rank: int, world: int, profile: str, mode: str, is_autotuned: bool) -> dict[str, Any]:
    """Compile a matmul and its reduction, call it three times, and return what was decided and what ran."""
    name = dist.new_group(list(range(world))).group_name

    def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        if mode == "all_reduce":
            return funcol.all_reduce(x @ w, "sum", name)
        return funcol.reduce_scatter_tensor(x @ w, "sum", 0, name)

    options = {
        "overlap": "auto",
        "inner": "aot_eager",
        "min_bytes": 0,
        "split": "off",
        "profile": profile,
        "autotune": is_autotuned,
    }
    x, w = data(512, 256, seed=rank).to(torch.bfloat16), data(256, 256, seed=9).to(torch.bfloat16)
    mark, before = HISTORY.mark(), site_stats()
    with torch.no_grad(), uncached():
        compiled = torch.compile(layer, backend="ub_overlap", options=options)
        worst = max((compiled(x, w).float() - layer(x, w).float()).abs().max().item() for _ in range(3))
    (plan,) = HISTORY.since(mark)
    (decision,) = plan.decisions
    site = str(SiteId(plan.digest, decision.id))
    ran = site_stats()
    return {
        "worst": worst, "strategy": str(decision.strategy), "predicted": [s for s, _ in decision.predicted],
        "again": Plan.from_json(plan.to_json()) == plan, "ran": dict(ran[site].strategies),
        "report": str(Report([plan], before)),
        "timed": dict(ran[f"{site}.tuning"].strategies) if f"{site}.tuning" in ran else {},
        "tuned": autotune.tuned_strategies(site),
    }  # fmt: skip


@pytest.mark.parametrize("mode", full_but(MODES[:1], MODES))
def test_direct_is_selected_where_it_is_predicted_best(pool2: RankPool, tmp_path: Path, mode: str) -> None:
    for found in pool2.run(run, profile_with(tmp_path / "fast.json", 1.0), mode, False):
        assert found["worst"] <= 0.5 and found["strategy"] == "direct" and found["ran"] == {"direct": 3}
        assert found["again"] and "direct" in found["predicted"] and "direct" in found["report"]
    for found in pool2.run(run, profile_with(tmp_path / "slow.json", 1e6), mode, False):
        assert found["worst"] <= 0.5 and "direct" not in found["ran"] and "direct" in found["predicted"]


def test_autotune_times_direct(pool2: RankPool, tmp_path: Path) -> None:
    first, second = pool2.run(run, profile_with(tmp_path / "fast.json", 1.0), "reduce_scatter", True)
    assert first["strategy"].startswith("direct|") and first["strategy"] == second["strategy"]
    assert set(first["timed"]) == set(first["strategy"].split("|")) and first["tuned"] == second["tuned"]
    (best,) = {tuned.strategy for tuned in first["tuned"].values()}
    assert first["worst"] <= 0.5 and first["ran"] == second["ran"] and best in first["ran"]

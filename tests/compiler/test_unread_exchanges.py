"""Exchanges that nothing reads, on a rank without tokens: its peer waits for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from tests.compiler.rank_compile import build
from tests.harness.fake_ranks import FakeRanks
from tests.harness.ranks import RankPool
from tests.models.compare import uncached, values
from ub_overlap.compiler.plan.strategy import Mode
from ub_overlap.compiler.reports.history import HISTORY

MOE = "tests.models.moe"
SPLIT: dict[str, Any] = {"inner": "aot_eager", "overrides": [{"kind": "all_to_all", "strategy": "split"}]}


def code_of_a_rank_without_tokens(rank: int, world: int) -> tuple[int, int]:
    """Return the numbers of exchanges that start in the generated code, and in the plan."""
    case = build(rank, world, MOE, {"shared": False, "tokens": (0, 24)})
    mark = HISTORY.mark()
    with uncached():
        compiled = torch.compile(case.module, backend="ub_overlap", options={**SPLIT, "inner": "inductor"})
        _, written = run_and_get_code(lambda: values(case, compiled))
    planned = sum(d.strategy.mode is Mode.SPLIT for plan in HISTORY.since(mark) for d in plan.decisions)
    return sum(text.count("start_all_to_all.default(") for text in written), planned


@pytest.mark.tier("test")
def test_code_keeps_exchanges_that_nothing_reads(fake2: FakeRanks) -> None:
    ((written, planned),) = fake2.run(code_of_a_rank_without_tokens)
    assert written == planned >= 4


@pytest.mark.tier("full")
def test_inductor_keeps_exchanges_that_nothing_reads(pool2: RankPool) -> None:
    """On a rank without tokens nothing reads the results of experts, but its peer waits for the exchange."""
    options = {**SPLIT, "inner": "inductor"}
    for outcome in pool2.run("tests.models.compare:compare", MOE, {"shared": False, "tokens": (24, 0)}, options):
        outcome.check(3.0)
        found = [d["strategy"] for d in outcome.decisions if d["kind"] == "all_to_all"]
        assert found == ["none", "split", "split", "split", "split"]

"""examples/expert_parallel: exchanges of experts split, against one process with all experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from examples.expert_parallel import train
from tests.harness.ranks import RankPool
from tests.harness.tiers import full_but
from ub_overlap.compiler.reports.history import HISTORY

pytestmark = pytest.mark.tier("test")


def run(rank: int, world: int, arguments: list[str]) -> dict[str, Any]:
    """Train, and return the result with the strategies of the exchanges."""
    torch._dynamo.reset()
    mark = HISTORY.mark()
    result = train.train(train.parse(arguments))
    decisions = [d for plan in HISTORY.since(mark) for d in plan.decisions]
    result["strategies"] = sorted(str(d.strategy) for d in decisions if d.kind.value == "all_to_all")
    dist.barrier()
    return result


@pytest.mark.parametrize(("world", "halves"), full_but([(2, False)], [(2, False), (4, False), (2, True)]))
def test_gradients_of_the_first_step(request: pytest.FixtureRequest, world: int, halves: bool) -> None:
    """One layer, whole or in two halves of its tokens; its counts are not split."""
    pool: RankPool = request.getfixturevalue(f"pool{world}")
    flags = "--device cpu --inner aot_eager --check --layers 1 --steps 3 --tokens 24 --width 32 --hidden 48"
    results = pool.run(run, [*flags.split(), "--split-tokens", "force" if halves else "off"])
    for result in results:
        assert result["gradient_error"] < 2e-2  # experts in bf16
        assert result["losses"] == results[0]["losses"] and len(result["losses"]) == 3
        assert result["strategies"] == (["none"] * 2 + ["split"] * 8 if halves else ["none"] + ["split"] * 4)

"""ZeRO-3 with sharded norms by Inductor: the kernels that it fuses across layers reverse no collectives of the plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

from tests.harness.fake_ranks import FakeRanks
from tests.harness.generated_code import matching_lines, planned_calls
from tests.models.compare import uncached
from ub_overlap import _torch_compat as compat
from ub_overlap.compiler.inductor import kernel_order
from ub_overlap.compiler.reports.history import HISTORY

LAYERS, WIDTH = 4, 64


class Layer(nn.Module):
    """Norm, two linears, residual: [N, WIDTH] -> the same. Each rank has a shard of all weights."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.ones(WIDTH // ranks))
        self.up = nn.Parameter(torch.randn(WIDTH // ranks, 2 * WIDTH) * 0.1)
        self.down = nn.Parameter(torch.randn(2 * WIDTH // ranks, WIDTH) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        h = F.rms_norm(x, x.shape[-1:], _whole(self.norm))
        return x + F.silu(h @ _whole(self.up)) @ _whole(self.down)


def _whole(shard: Tensor) -> Tensor:
    return funcol.wait_tensor(compat.all_gather_with_gradient(shard, 0, dist.group.WORLD))


def communication(rank: int, world: int, chained: bool) -> list[tuple[list[str], list[str]]]:
    """Return for forward and backward the starts and finishes in the generated code, and in the plan."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Layer(world) for _ in range(LAYERS)])
    options: dict[str, Any] = {"overrides": [{"strategy": "split"}], "memory_budget": 0, "coalesce": "off"}
    compiled = torch.compile(model, backend="ub_overlap", options=options)
    x = torch.randn(128, WIDTH, requires_grad=True)
    mark = HISTORY.mark()
    with pytest.MonkeyPatch.context() as patch, uncached():
        if not chained:
            patch.setattr(kernel_order, "chain_collectives", list)
        _, written = run_and_get_code(lambda: compiled(x).square().sum().backward())
    matches = matching_lines(written, r"(start|finish)_c\w+\.default\(.*'[\w-]+/(\w+\.\d+)'")
    found = [[f"{m[1]} {m[2]}" for m in program] for program in matches if program]
    planned = [planned_calls(d.to_dict() for d in plan.decisions) for plan in HISTORY.since(mark)]
    return list(zip(found, planned, strict=True))


@pytest.mark.tier("full")
def test_the_order_of_the_plan(fake2: FakeRanks) -> None:
    for programs in fake2.run(communication, True):
        assert [len(planned) for _, planned in programs] == [2 * 3 * LAYERS, 2 * 2 * 3 * LAYERS - 2 * LAYERS]
        for written, planned in programs:
            assert written == planned


@pytest.mark.tier("test")
def test_the_order_is_held_by_dependencies(fake2: FakeRanks) -> None:
    """Without them fusion reverses collectives of the backward: the test above can fail."""
    for programs in fake2.run(communication, False):
        written, planned = programs[1]
        assert written != planned and sorted(written) == sorted(planned)

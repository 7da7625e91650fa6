"""Blocks whose norms, biases and weights are small shards, on ranks: buckets of a compiled model."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.compare import uncached
from ub_overlap.compiler.plan.decision import Decision
from ub_overlap.compiler.reports.history import HISTORY


def buckets(decisions: tuple[Decision, ...]) -> list[str]:
    """Return for each collective the site that sends it together with others, or "-"."""
    return [(d.window and d.window.bucket) or "-" for d in decisions]


class Block(nn.Module):
    """A norm and a linear whose weight, bias and norm are this rank's shards. [M, D] -> the same."""

    def __init__(self, width: int, rank: int, world: int) -> None:
        super().__init__()
        whole = torch.randn(width, width) / width**0.5, torch.randn(width), torch.rand(width)
        self.weight, self.bias, self.norm = (nn.Parameter(t.chunk(world)[rank].clone()) for t in whole)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias, norm = (
            funcol.all_gather_tensor_autograd(p, 0, dist.group.WORLD) for p in (self.weight, self.bias, self.norm)
        )
        return x + F.linear(F.rms_norm(x, x.shape[-1:], norm), weight, bias)


def run_blocks(rank: int, world: int, options: dict[str, Any], device: str = "cpu") -> str:
    """Compare two steps of compiled blocks with eager code. Return what differs, or ""."""
    torch.manual_seed(3)
    model = nn.Sequential(*(Block(256, rank, world) for _ in range(4))).to(device)
    x = torch.randn(4096, 256, generator=torch.Generator().manual_seed(rank)).to(device)

    def step(call: Any) -> list[Tensor]:
        model.zero_grad()
        output = call(x)
        output.square().mean().backward()
        return [output.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    truth, mark = step(model), HISTORY.mark()
    with uncached():
        compiled = torch.compile(model, backend="ub_overlap", options={"profile": "h200", **options})
        for _ in range(2):
            for i, (a, b) in enumerate(zip(step(compiled), truth, strict=True)):
                if not torch.allclose(a, b, rtol=1e-4, atol=1e-5):
                    return f"result {i} differs by {(a - b).abs().max()}"
    plans = HISTORY.since(mark)
    sizes = [sum(name != "-" for name in buckets(p.decisions)) for p in plans]
    return "" if len(plans) == 2 and min(sizes) > 3 else f"{len(plans)} plans, collectives in buckets: {sizes}"

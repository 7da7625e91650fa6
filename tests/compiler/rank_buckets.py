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


def size(d: Decision) -> int:
    """Return the MiB of landing memory of a split collective."""
    return d.window.landing_bytes >> 20 if d.window else 0


class Block(nn.Module):
    """A norm and a linear whose weight, bias and norm are this rank's shards. [M, D] -> the same."""

    def __init__(self, width: int, rank: int, world: int) -> None:
        super().__init__()
        self.whole = torch.randn(width, width) / width**0.5, torch.randn(width), torch.rand(width)
        self.weight, self.bias, self.norm = (nn.Parameter(t.chunk(world)[rank].clone()) for t in self.whole)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias, norm = (
            funcol.all_gather_tensor_autograd(p, 0, dist.group.WORLD) for p in (self.weight, self.bias, self.norm)
        )
        return compute(x, weight, bias, norm)


def compute(x: Tensor, weight: Tensor, bias: Tensor, norm: Tensor) -> Tensor:
    """Return what a block gives with whole parameters."""
    return x + F.linear(F.rms_norm(x, x.shape[-1:], norm), weight, bias)


def find_truth(model: nn.Sequential, inputs: list[Tensor], rank: int) -> list[Tensor]:
    """Return this rank's output and gradients of its shards, in fp64 and without communication. `inputs`: of all ranks."""
    whole = [[t.to(inputs[0].device, torch.float64).requires_grad_() for t in block.whole] for block in model]
    outputs = []
    for x in inputs:
        y = x.double()
        for parameters in whole:
            y = compute(y, *parameters)
        y.square().mean().backward()  # the gradients of all ranks add up
        outputs.append(y.detach())
    shards = [parameter.grad.chunk(len(inputs))[rank] for parameters in whole for parameter in parameters]
    return [t.float() for t in (outputs[rank], *shards)]


def run_blocks(rank: int, world: int, options: dict[str, Any], device: str = "cpu", width: int = 256) -> str:
    """Compare two steps of compiled blocks with the truth. Return what differs, or "". From 1024 on weights are large."""
    torch.manual_seed(3)
    model = nn.Sequential(*(Block(width, rank, world) for _ in range(4))).to(device)
    rows = 4096 if width < 1024 else 1024
    inputs = [torch.randn(rows, width, generator=torch.Generator().manual_seed(r)).to(device) for r in range(world)]

    def step(call: Any) -> list[Tensor]:
        model.zero_grad()
        output = call(inputs[rank])
        output.square().mean().backward()
        return [output.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    truth, mark = find_truth(model, inputs, rank), HISTORY.mark()
    with uncached():
        compiled = torch.compile(model, backend="ub_overlap", options={"profile": "h200", **options})
        for _ in range(2):
            for i, (a, b) in enumerate(zip(step(compiled), truth, strict=True)):
                if not torch.allclose(a, b, rtol=1e-4, atol=1e-5):
                    return f"result {i} differs by {(a - b).abs().max()}"
    plans = HISTORY.since(mark)
    sizes = [sum(name != "-" for name in buckets(p.decisions)) for p in plans]
    if len(plans) != 2 or min(sizes) <= 3:
        return f"{len(plans)} plans, collectives in buckets: {sizes}"
    joined = [[d.window for d in p.decisions if d.window and d.window.bucket] for p in plans]
    stays = [sum(window.releases is not None for window in windows) for windows in joined]
    if (max(stays) > 1) != ("zero_copy" in options):
        return f"in buckets that stay in landing memory: {stays}"
    large = [sum(name != "-" and size(d) > 2 for d, name in zip(p.decisions, buckets(p.decisions), strict=True)) for p in plans]
    return "" if width < 1024 or max(large) > 1 else f"weights in buckets: {large}"

"""Rank functions of test_python_reducer.py: DDP whose all_reduces compiled autograd traces into the backward graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch.nn.parallel import DistributedDataParallel

from ub_overlap import optimize_ddp
from ub_overlap.compiler.passes import RewritePass
from ub_overlap.compiler.plan.plan import Plan
from ub_overlap.compiler.reports.history import HISTORY


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.LayerNorm(64))


class UsedTwice(nn.Module):
    """Two weights, each used twice. The gradient of `plain` is a sum of two products, that of `masked` such a sum, masked."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.plain, self.masked = (nn.Parameter(torch.randn(64, 64) / 8) for _ in range(2))
        self.register_buffer("mask", (torch.rand(64, 64) < 0.5).float())

    def forward(self, x: Tensor) -> Tensor:
        for weight in (self.plain, self.masked * self.mask):
            x = F.linear(F.linear(x, weight).relu(), weight)
        return x


class Autocast(nn.Module):
    """The model of `make_model` in bf16: fp32 gradients are casts of products and, for biases, of sums over the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make_model()

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.model(x)


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(10 * step + rank))


@contextlib.contextmanager
def python_reducer() -> Iterator[None]:
    fuses = inductor_config._fuse_ddp_communication
    optimize_ddp("python_reducer")
    try:
        yield
    finally:
        optimize_ddp("ddp_optimizer")
        torch._dynamo.config.compiled_autograd = False
        inductor_config._fuse_ddp_communication = fuses  # DistributedDataParallel sets it


def train(call: Callable[[Tensor], Tensor], model: nn.Module, rank: int) -> list[list[Tensor]]:
    """Return losses and gradients of four steps. The second one adds to the gradients of the first."""
    results = []
    for step in range(4):
        if step != 1:
            model.zero_grad(set_to_none=True)
        loss = call(batch(rank, step))
        results.append([loss.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    return results


def planned(rank: int, world: int, make: Callable[[], nn.Module], options: dict[str, Any]) -> tuple[list[str], list[Plan]]:
    """Return what differs from eager DDP, and the plans of backward graphs."""

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss

    model: nn.Module = DistributedDataParallel(make())
    plain = train(step, model, rank)
    mark = HISTORY.mark()
    with python_reducer():
        model = DistributedDataParallel(make())
        own = train(torch.compile(step, backend="ub_overlap", options={"inner": "aot_eager", **options}), model, rank)
    bad = [
        f"step {i}, tensor {j}: {(a - b).abs().max()}"
        for i, (one, two) in enumerate(zip(own, plain, strict=True))
        for j, (a, b) in enumerate(zip(one, two, strict=True))
        if not torch.allclose(a, b, rtol=1e-5, atol=1e-7)
    ]
    return bad, [plan for plan in HISTORY.since(mark) if plan.decisions]


def traced(rank: int, world: int, options: dict[str, Any]) -> tuple[list[str], list[list[tuple[str, ...]]], list[int]]:
    """Return what differs from eager DDP, the decisions of each backward graph, and the copies left in each."""
    copies: list[int] = []
    before = RewritePass.__call__

    def count(self: RewritePass, graph: torch.fx.Graph) -> None:
        before(self, graph)
        copies.append(len(graph.find_nodes(op="call_function", target=torch.ops.aten.copy.default)))

    RewritePass.__call__ = count  # type: ignore[method-assign]
    try:
        bad, plans = planned(rank, world, make_model, options)
    finally:
        RewritePass.__call__ = before  # type: ignore[method-assign]
    return bad, [[(d.phase, d.kind.value, str(d.strategy)) for d in plan.decisions] for plan in plans], copies

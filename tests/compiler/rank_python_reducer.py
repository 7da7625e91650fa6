"""Rank functions of test_python_reducer.py: DDP whose all_reduces compiled autograd traces into the backward graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch.nn.parallel import DistributedDataParallel

from ub_overlap import optimize_ddp
from ub_overlap.compiler.passes import RewritePass
from ub_overlap.compiler.reports.history import HISTORY


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.LayerNorm(64))


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


def traced(rank: int, world: int, options: dict[str, Any]) -> tuple[list[str], list[list[tuple[str, ...]]], list[int]]:
    """Return what differs from eager DDP, the decisions of each backward graph, and the copies left in each."""
    copies: list[int] = []
    before = RewritePass.__call__

    def count(self: RewritePass, graph: torch.fx.Graph) -> None:
        before(self, graph)
        copies.append(len(graph.find_nodes(op="call_function", target=torch.ops.aten.copy.default)))

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss

    model: nn.Module = DistributedDataParallel(make_model())
    plain = train(step, model, rank)
    mark = HISTORY.mark()
    with python_reducer():
        model = DistributedDataParallel(make_model())
        RewritePass.__call__ = count  # type: ignore[method-assign]
        try:
            own = train(torch.compile(step, backend="ub_overlap", options={"inner": "aot_eager", **options}), model, rank)
        finally:
            RewritePass.__call__ = before  # type: ignore[method-assign]
    bad = [
        f"step {i}, tensor {j}: {(a - b).abs().max()}"
        for i, (one, two) in enumerate(zip(own, plain, strict=True))
        for j, (a, b) in enumerate(zip(one, two, strict=True))
        if not torch.allclose(a, b, rtol=1e-5, atol=1e-7)
    ]
    plans = [plan for plan in HISTORY.since(mark) if plan.decisions]
    return bad, [[(d.phase, d.kind.value, str(d.strategy)) for d in plan.decisions] for plan in plans], copies

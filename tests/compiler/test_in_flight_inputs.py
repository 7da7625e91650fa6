"""Compiled blocks behind eager tensor-parallel modules, whose results are in flight when the blocks are called."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

from tests.harness.ranks import RankPool
from tests.models.compare import uncached
from ub_overlap import _torch_compat as compat
from ub_overlap.compiler.reports.history import HISTORY


class Block(nn.Module):
    """[B, S/R, D] of this rank -> [B, S, D]."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x.mean() + self.linear(funcol.all_gather_tensor_autograd(x, 1, dist.group.WORLD))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.block = nn.Embedding(32, 64), Block()
        self.types: set[type] = set()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        self.types.add(type(x))
        return self.block(x)


def gradients(rank: int, world: int, inner: str) -> tuple[float, float, bool, list[str]]:
    """Return the largest difference of two steps from eager, the norm of the embedding's gradient, whether it was in flight."""
    results = []
    mark = HISTORY.mark()
    for is_compiled in (False, True):
        torch.manual_seed(0)
        model = Model()
        plan = {"embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))}
        parallelize_module(model, init_device_mesh("cpu", (world,)), plan)
        if is_compiled:
            model.block.compile(backend="ub_overlap", options={"overlap": "force", "inner": inner})
        with uncached():
            for step in range(2):
                tokens = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(step))
                model(tokens).square().mean().backward()
        results.append([p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for p in model.parameters()])  # type: ignore[union-attr]
    eager, ours = results
    strategies = [d.strategy.mode.value for p in HISTORY.since(mark) for d in p.decisions]
    worst = max(float((a - b).abs().max()) for a, b in zip(ours, eager, strict=True))
    return worst, float(ours[0].norm()), compat.InFlightTensor in model.types, strategies


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_gradients_reach_what_is_in_flight(pool2: RankPool, inner: str) -> None:
    """torch's own backends leave the embedding without a gradient here, or fail."""
    for worst, norm, was_in_flight, strategies in pool2.run(gradients, inner):
        assert was_in_flight and norm > 0.01
        assert worst < 1e-5
        assert "pipelined" in strategies, strategies

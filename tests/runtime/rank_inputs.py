"""Rank function of test_other_inputs.py: one rank brings another batch to a graph that all ranks compiled for both."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ub_overlap  # noqa: F401  (registers the backend)

from .oracle import data
from .rank_failures import attempt, fresh

C10D = torch.ops._c10d_functional


class Block(nn.Module):
    """all_gather, two linears, reduce_scatter."""

    def __init__(self, group: str, ranks: int) -> None:
        super().__init__()
        self.group, self.ranks = group, ranks
        self.a, self.b = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        whole = C10D.wait_tensor(C10D.all_gather_into_tensor(x, self.ranks, self.group))
        out = self.b(self.a(whole).relu())
        return C10D.wait_tensor(C10D.reduce_scatter_tensor(out, "sum", self.ranks, self.group))


def other_inputs(rank: int, world: int, how: str) -> dict[str, Any]:
    """All ranks run both inputs. Then rank 1 runs the second and the others the first."""
    model = Block(fresh(world), world)
    run = torch.compile(model, backend="ub_overlap", options={"overlap": "force", "inner": "aot_eager"}, dynamic=False)
    first = data(32, 16, seed=rank)
    second = data(64, 16, seed=rank) if how == "batch" else data(32, 16, seed=rank, dtype=torch.bfloat16)

    def step(x: Tensor) -> None:
        with torch.no_grad():
            model.to(x.dtype)
            run(x)

    step(first)
    step(second)
    dist.barrier()
    return attempt(lambda: step(second if rank == 1 else first))

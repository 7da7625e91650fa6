"""`dist.all_gather` into a list whose tensors are joined again is a gather like any other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.harness.ranks import RankPool
from ub_overlap.compiler.reports.history import HISTORY


def joined(x: Tensor, w: Tensor, dim: int) -> Tensor:
    shards = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(shards, x)
    return torch.cat(shards, dim) @ w


def swapped(x: Tensor, w: Tensor, dim: int) -> Tensor:
    """The order of the shards is another one."""
    shards = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(shards, x)
    return torch.cat(shards[::-1], dim) @ w


def compiled(rank: int, world: int, name: str, dim: int) -> tuple[list[tuple[str, str]], float]:
    """Return kinds and strategies of the collectives, and the largest difference to eager code."""
    torch._dynamo.reset()
    layer = {"joined": joined, "swapped": swapped}[name]
    torch.manual_seed(rank)
    x, w = torch.randn(8, 16), torch.randn(16 * (world if dim else 1), 24)
    mark = HISTORY.mark()
    call: Any = torch.compile(
        layer, backend="ub_overlap", options={"inner": "aot_eager", "overlap": "force", "split": "off"}, fullgraph=True
    )
    error = float((call(x, w, dim) - layer(x, w, dim)).abs().max())
    return [(d.kind.value, str(d.strategy)) for plan in HISTORY.since(mark) for d in plan.decisions], error


@pytest.mark.parametrize("dim", [0, 1])
def test_joined_shards(pool2: RankPool, dim: int) -> None:
    for rows, error in pool2.run(compiled, "joined", dim):
        assert rows == [("all_gather_matmul", "pipelined")] and error < 1e-4


def test_another_order_is_no_gather_of_ours(pool2: RankPool) -> None:
    for rows, error in pool2.run(compiled, "swapped", 0):
        assert [strategy for _, strategy in rows] == ["none"] and error == 0

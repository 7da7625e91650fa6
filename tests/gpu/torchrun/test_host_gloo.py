"""The c10d backend of ranks that share a GPU: every collective and message against what it is to return."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.gpu.cases import BF16, E4M3, F16, F32
from tests.gpu.lockstep import Lockstep
from tests.gpu.shared_gpu.backend import register


@pytest.fixture
def staged(lockstep: Lockstep) -> Any:
    """A process group with this backend for the tensors of `lockstep.device`."""
    if lockstep.cuda and not lockstep.shares_gpu:
        pytest.skip("each rank has a GPU")
    return dist.new_group(backend=f"{lockstep.device_type}:{register()}")


def tensors_of_ranks(lockstep: Lockstep, dtype: torch.dtype) -> list[Tensor]:
    return [(torch.arange(12, device=lockstep.device).view(4, 3) + rank).to(dtype) for rank in range(lockstep.ranks)]


def same(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype and torch.equal(found.float(), expected.float())


@pytest.mark.parametrize("dtype", [F32, BF16, F16, torch.int64, E4M3], ids=str)
def test_moved(lockstep: Lockstep, staged: Any, dtype: torch.dtype) -> None:
    each = tensors_of_ranks(lockstep, dtype)
    mine, rank, ranks = each[lockstep.rank], lockstep.rank, lockstep.ranks
    whole = torch.cat(each)
    gathered = torch.empty_like(whole)
    dist.all_gather_into_tensor(gathered, mine, group=staged)
    same(gathered, whole)
    for exchange in (
        lambda out: dist.all_gather(out, mine, group=staged),
        lambda out: dist.all_to_all(out, [mine] * ranks, group=staged),
    ):
        out = [torch.empty_like(mine) for _ in range(ranks)]
        exchange(out)
        same(torch.cat(out), whole)
    same(torch.ops._c10d_functional.wait_tensor(gather_of(mine, ranks, staged)), whole)
    copy = mine.clone()
    dist.broadcast(copy, 0, group=staged)
    same(copy, each[0])
    rows = [(rank + other) % 3 for other in range(ranks)]  # some are empty
    out_rows = torch.empty(sum(rows), 3, device=lockstep.device).to(dtype)
    dist.all_to_all_single(out_rows, mine[:1, :1].expand(sum(rows), 3).contiguous(), rows, rows, group=staged)
    same(out_rows, torch.cat([part[:1, :1].expand(count, 3) for part, count in zip(each, rows, strict=True)]))
    got = torch.empty_like(mine)
    ring = [dist.P2POp(dist.isend, mine, group=staged, group_peer=(rank + 1) % ranks)]
    ring.append(dist.P2POp(dist.irecv, got, group=staged, group_peer=(rank - 1) % ranks))
    for work in dist.batch_isend_irecv(ring):
        work.wait()
    same(got, each[rank - 1])


def gather_of(mine: Tensor, ranks: int, group: Any) -> Tensor:
    return torch.ops._c10d_functional.all_gather_into_tensor(mine, ranks, group.group_name)


@pytest.mark.parametrize("dtype", [F32, BF16, F16, torch.int64], ids=str)
def test_reduced(lockstep: Lockstep, staged: Any, dtype: torch.dtype) -> None:
    each = tensors_of_ranks(lockstep, dtype)
    mine, stacked = each[lockstep.rank], torch.stack(each)
    by = {dist.ReduceOp.SUM: stacked.float().sum(0), dist.ReduceOp.MAX: stacked.float().amax(0)}
    if dtype.is_floating_point:
        by[dist.ReduceOp.AVG] = stacked.float().mean(0)
    for op, expected in by.items():
        total = mine.clone()
        work = dist.all_reduce(total, op, group=staged, async_op=True)
        assert work is not None and work.wait() and work.get_future().done()
        same(total, expected.to(dtype))
        shard = torch.empty_like(mine)
        dist.reduce_scatter_tensor(shard, torch.cat([mine] * lockstep.ranks), op, group=staged)
        same(shard, expected.to(dtype))
        total = mine.clone()
        dist.reduce(total, 0, op, group=staged)
        if lockstep.rank == 0:
            same(total, expected.to(dtype))
    dist.barrier(group=staged)

"""Rings whose ranks disagree: one of the user's own, where rank 0 does not read the gradient that it receives, and torch's as
it is traced."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import ub_overlap
from tests.context_parallel.rank_attention import compare_forms
from tests.models.compare import uncached
from tests.runtime.rank_failures import attempt

HEADS, REPEATS, WIDTH = 2, 3, 256


def _to_next(x: Tensor, rank: int, group: str) -> Tensor:
    """Send all rows to the other of two ranks."""
    splits = [len(x) if r != rank else 0 for r in range(2)]
    return funcol.wait_tensor(funcol.all_to_all_single(x, splits, splits, group))


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, keys: Tensor, rank: int, group: str) -> Tensor:
        ctx.rank, ctx.group = rank, group
        return _to_next(keys.contiguous(), rank, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        received = _to_next(gradient.contiguous(), ctx.rank, ctx.group)
        return (gradient + received if ctx.rank else gradient), None, None


def train(rank: int, world: int, options: dict[str, Any], merges: bool) -> dict[str, Any]:
    """Return the outcome of one step of a group of its own, and whether its gradient is that of the eager step."""
    group: Any = dist.new_group(list(range(world)))

    def loss(x: Tensor) -> Tensor:
        keys = x.unsqueeze(1).expand(HEADS, REPEATS, WIDTH).reshape(HEADS * REPEATS, WIDTH)
        return (_Rotate.apply(keys, rank, group.group_name) * keys).sum()

    def gradient(function: Any) -> Tensor:
        x = torch.arange(HEADS * WIDTH, dtype=torch.float32).reshape(HEADS, WIDTH).div(WIDTH).add(rank).requires_grad_()
        function(x).backward()
        assert x.grad is not None
        return x.grad

    expected, found = gradient(loss), list[Tensor]()
    before = ub_overlap.settings().merge_collectives
    try:
        ub_overlap.configure(merge_collectives=merges)
        with uncached():
            outcome = attempt(lambda: found.append(gradient(torch.compile(loss, backend="ub_overlap", options=options))))
    finally:
        ub_overlap.configure(merge_collectives=before)
    return {**outcome, "same": bool(found) and torch.equal(found[0], expected)}


def not_merged(rank: int, world: int, options: dict[str, Any]) -> str:
    """Return the error of torch's ring with a causal mask, in a group of its own. Backward exchanges keys and values again."""
    before = ub_overlap.settings().merge_collectives
    mesh = DeviceMesh.from_group(dist.new_group(list(range(world))), "cpu")
    try:
        ub_overlap.configure(merge_collectives=False)
        return str(attempt(lambda: compare_forms(rank, world, "sdpa", options, "alltoall", False, True, mesh=mesh))["error"])
    finally:
        ub_overlap.configure(merge_collectives=before)


def checkpointed(rank: int, world: int, options: dict[str, Any]) -> str:
    """Return the error of torch's ring with a causal mask and checkpointed layers, in a group of its own."""
    mesh = DeviceMesh.from_group(dist.new_group(list(range(world))), "cpu")
    call = functools.partial(compare_forms, rank, world, "sdpa", options, "alltoall", False, True, checkpointed=True, mesh=mesh)
    return str(attempt(call)["error"])

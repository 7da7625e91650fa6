"""Pipeline stages on GPUs: sends before weight gradients in compiled stages, and messages of several pieces."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import get_schedule_class

import ub_overlap
from tests.gpu.lockstep import Lockstep

WIDTH, TOKENS, MICROBATCHES = 512, 256, 8


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


def gradients(lockstep: Lockstep, name: str, modules: list[nn.Module], stages: list[int]) -> list[Tensor]:
    """Run two steps over channels. Return the sums of this rank's gradients."""
    group = ub_overlap.pipeline.make_group(lockstep.group())
    count = lockstep.ranks * len(stages)
    made = [ub_overlap.pipeline.Stage(m, i, count, lockstep.device, group=group) for m, i in zip(modules, stages, strict=True)]
    schedule: Any = get_schedule_class(name)
    runner = schedule(made if len(made) > 1 else made[0], MICROBATCHES, loss_fn=nn.functional.mse_loss)
    generator = torch.Generator(lockstep.device).manual_seed(1)
    x = torch.randn(MICROBATCHES, TOKENS, WIDTH, device=lockstep.device, generator=generator)
    for _ in range(2):
        runner.step(*((x,) if 0 in stages else ()), **({"target": torch.zeros_like(x)} if count - 1 in stages else {}))
    torch.cuda.synchronize()
    return [p.grad for m in modules for p in m.parameters() if p.grad is not None]


@pytest.mark.parametrize("name", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"])
def test_deferred_weight_gradients(lockstep: Lockstep, name: str) -> None:
    """Equal to eager modules, which send after the backward. Also as Stage: torch 2.11 sends to the own rank in a V."""
    rank, ranks = dist.get_rank(), lockstep.ranks
    if 2 * ranks > MICROBATCHES:
        pytest.skip("DualPipeV needs as many microbatches as stages")
    stages = {"1F1B": [rank], "Interleaved1F1B": [rank, rank + ranks]}.get(name, [rank, 2 * ranks - 1 - rank])
    torch.manual_seed(rank)
    plain: list[nn.Module] = [Mlp().to(lockstep.device) for _ in stages]
    deferring = copy.deepcopy(plain)
    for module in deferring:
        module.compile(backend="ub_overlap", options={"defer_weight_gradients": True})
    expected = gradients(lockstep, name, plain, stages)
    found = gradients(lockstep, name, deferring, stages)
    assert len(found) == len(expected) == 4 * len(stages)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_messages_of_several_pieces(lockstep: Lockstep) -> None:
    """A channel holds two messages of 40 MiB in slots of at most 16 MiB, and delivers them whole."""
    group, rank = lockstep.new_group(), dist.get_rank()
    count = 10 << 20
    assert ub_overlap.initialize_point_to_point(group, 4 * count, slots=2) >= 4 * count
    right, left = (rank + 1) % lockstep.ranks, (rank - 1) % lockstep.ranks
    own = torch.arange(count, device=lockstep.device, dtype=torch.int32)
    for turn in range(5):
        ub_overlap.isend(own + turn + 1000 * rank, group=group, group_dst=right)
        out = torch.zeros_like(own)
        ub_overlap.recv(out, group=group, group_src=left)
        assert torch.equal(out, own + turn + 1000 * left)

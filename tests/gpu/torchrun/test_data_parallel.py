"""FSDP2 and DDP with our collectives against torch's: training, gathers in flight, and ranks that are late on their own.

Gathers are compared bit by bit: so are the first losses. Gradients of 2 ranks have one sum, others are compared with a bound.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import ub_overlap
from tests.gpu.cases import BF16, F32
from tests.gpu.lockstep import Lockstep
from tests.harness.later_steps import compiled_before
from ub_overlap.runtime.data_parallel import eager_collectives
from ub_overlap.runtime.data_parallel.landing_slots import LandingSlots
from ub_overlap.runtime.session import session

WIDTH, INNER, BLOCKS, ROWS = 512, 1411, 5, 96
"""INNER divides by no number of ranks, so shards are padded and their rows have odd addresses."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def make_model(lockstep: Lockstep) -> nn.Sequential:
    torch.manual_seed(0)
    with lockstep.device:
        return nn.Sequential(*(Block() for _ in range(BLOCKS)))


def sharded(lockstep: Lockstep, **options: Any) -> Any:
    model = make_model(lockstep)
    mesh = init_device_mesh(lockstep.device_type, (lockstep.ranks,))
    for block in model:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def train(lockstep: Lockstep, model: Any, steps: int, is_late: bool = False) -> tuple[list[Tensor], list[Tensor]]:
    """Return the losses and the local gradients of the first step. `is_late`: ranks sleep on their own before blocks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    mine = lockstep.own_random(5)
    hooks = []
    if is_late:
        late: Callable[..., None] = lambda *_: lockstep.sleep_on_device(mine.random() * 0.002)  # noqa: E731
        blocks = [module for module in model.modules() if isinstance(module, Block)]
        hooks = [block.register_forward_pre_hook(late) for block in blocks]
        hooks += [block.register_full_backward_pre_hook(late) for block in blocks]
    losses, grads = [], list[Tensor]()
    for step in range(steps):
        torch.manual_seed(100 * step + lockstep.rank)
        x = torch.randn(ROWS, WIDTH, device=lockstep.device)
        with compiled_before(step):
            loss = model(x).float().square().mean()
            loss.backward()
        losses.append(loss.detach())
        if not grads:
            grads = [local_of(p.grad).clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    for hook in hooks:
        hook.remove()
    return losses, grads


def local_of(grad: Any) -> Tensor:
    return grad.to_local() if hasattr(grad, "to_local") else grad


def differences(lockstep: Lockstep, own: Any, plain: Any, bound: float) -> list[str]:
    """Return what differs: the first loss at all, others and gradients by more than `bound`."""
    bad = [] if torch.equal(own[0][0], plain[0][0]) else ["first loss"]
    for i, (a, b) in enumerate(zip(own[0], plain[0], strict=True)):
        if not torch.isfinite(a) or (a - b).abs() > bound * b.abs():
            bad.append(f"loss {i}: {a.item()} {b.item()}")
    for i, (a, b) in enumerate(zip(own[1], plain[1], strict=True)):
        if a.numel() and not (a.double() - b.double()).norm() <= bound * b.double().norm() + 1e-12:
            bad.append(f"gradient {i}: {(a.double() - b.double()).norm() / b.double().norm()}")
    return bad


POLICIES = {
    "fp32": ({}, 1e-5),
    "bf16": ({"mp_policy": MixedPrecisionPolicy(param_dtype=BF16)}, 2e-2),
    "bf16 sums of fp32": ({"mp_policy": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32)}, 1e-3),
    "kept": ({"reshard_after_forward": False}, 1e-5),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("is_late", [False, True])
def test_fsdp_trains_as_torch(lockstep: Lockstep, policy: str, is_late: bool) -> None:
    options, bound = POLICIES[policy]
    plain = train(lockstep, sharded(lockstep, **options), 6)
    model = sharded(lockstep, **options)
    installation = ub_overlap.fsdp.install(model)
    assert len(installation) >= BLOCKS
    own = train(lockstep, model, 6, is_late)
    lockstep.sync()
    session.check()
    used = {one.transport for site, one in ub_overlap.site_stats().items() if site.startswith("/fsdp")}
    assert "c10d" not in used and used, used
    (own_group,) = installation._groups.own_groups()
    slots = LandingSlots.of(own_group, lockstep.device)._slots
    assert sum(slot.bytes > 0 for slot in slots) >= 2, "a forward has two results in landing memory"
    assert differences(lockstep, own, plain, bound) == []


def test_fsdp_gathers_in_flight(lockstep: Lockstep) -> None:
    """All gathers of a forward start at once, and so do asynchronous ones, while ranks are late."""
    plain = train(lockstep, sharded(lockstep), 4)
    model = sharded(lockstep)
    ub_overlap.fsdp.install(model)
    blocks = list(model)
    model.set_modules_to_forward_prefetch(blocks)
    blocks[-1].set_modules_to_backward_prefetch(blocks[:-1][::-1])
    own = train(lockstep, model, 4, is_late=True)
    handles = [block.unshard(async_op=True) for block in blocks]
    lockstep.sleep_on_device(0.002 * lockstep.rank)
    for handle in reversed(handles):
        handle.wait()
    whole = [p.detach().clone() for block in blocks for p in block.parameters()]
    reference = sharded(lockstep)
    reference.load_state_dict(model.state_dict())
    for block in reference:
        block.unshard()
    lockstep.sync()
    session.check()
    gathered = [p for block in reference for p in block.parameters()]
    wrong = [i for i, (a, b) in enumerate(zip(whole, gathered, strict=True)) if not torch.equal(a, b)]
    assert (differences(lockstep, own, plain, 1e-5), wrong) == ([], [])


@pytest.mark.parametrize(("wire_dtype", "piece_bytes"), [(None, 1 << 26), (BF16, 1 << 26), (None, 1 << 20), (BF16, 1 << 20)])
def test_ddp_trains_as_torch(
    lockstep: Lockstep, wire_dtype: torch.dtype | None, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with buckets in pieces."""
    monkeypatch.setattr(eager_collectives, "PIECE_BYTES", piece_bytes)

    def replicated() -> DistributedDataParallel:
        devices = [lockstep.device.index] if lockstep.cuda else None
        return DistributedDataParallel(make_model(lockstep), device_ids=devices, bucket_cap_mb=4)

    plain = train(lockstep, replicated(), 6)
    model = replicated()
    ub_overlap.ddp.install(model, wire_dtype=wire_dtype)
    own = train(lockstep, model, 6, is_late=True)
    lockstep.sync()
    session.check()
    assert differences(lockstep, own, plain, 1e-5 if wire_dtype is None else 2e-2) == []

"""Rank functions of test_ddp.py: DistributedDataParallel with our hook against torch's own all_reduce."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ub_overlap
from tests.runtime.rank_failures import attempt
from tests.runtime.rank_sessions import C, reset

from .rank_fsdp import Model, exact_grads, logged, loss_of


def replicated(dtype: torch.dtype = torch.float32, **options: Any) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(Model().to(dtype), bucket_cap_mb=0.004, **options)  # several buckets


def train(model: DistributedDataParallel, rank: int, steps: int = 3, micro: int = 1) -> tuple[list[float], list[torch.Tensor]]:
    """Return the losses and the gradients of the first step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, grads = [], list[torch.Tensor]()
    for step in range(steps):
        for part in range(micro):
            model.require_backward_grad_sync = part == micro - 1
            loss = loss_of(model, rank, micro * step + part)
            loss.backward()
            losses.append(loss.item())
        grads = grads or [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return losses, grads


def trains_as_torch(rank: int, world: int) -> list[str]:
    """Equal to torch bit by bit with 2 ranks, where a sum has one order. Return what differs."""
    bad = []
    cases: dict[str, tuple[dict[str, Any], int]] = {
        "plain": ({}, 1),
        "views": ({"gradient_as_bucket_view": True}, 1),
        "static graph": ({"static_graph": True}, 1),
        "accumulation": ({}, 2),
        "its own group": ({"process_group": dist.new_group(list(range(world)))}, 1),
    }
    for name, (options, micro) in cases.items():
        plain = train(replicated(**options), rank, micro=micro)
        model = replicated(**options)
        C.clear_stats()
        ub_overlap.ddp.install(model)
        own = train(model, rank, micro=micro)
        calls = {site: one.transport for site, one in ub_overlap.site_stats().items()}
        if len(calls) < 3 or set(calls.values()) != {"shared memory"}:
            bad.append(f"{name}: {calls}")
        if own[0] != plain[0] or not all(torch.equal(a, b) for a, b in zip(own[1], plain[1], strict=True)):
            bad.append(f"{name}: {own[0]} {plain[0]}")
    return bad


def sixteen_bits(rank: int, world: int) -> list[str]:
    """Gradients that travel in 16 bits, and those of a bf16 model, are within one rounding of the fp32 mean."""
    bad = []
    exact = list(exact_grads(world).values())
    for wire, epsilon in ((torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)):
        model = replicated()
        ub_overlap.ddp.install(model, wire_dtype=wire)
        for own, want in zip(train(model, rank, steps=1)[1], exact, strict=True):
            largest = want.abs().max()
            if own.dtype is not torch.float32 or (own - want).abs().max() > 3 * epsilon * largest + 1e-7:
                bad.append(f"{wire} {tuple(want.shape)} {(own - want).abs().max()}")
    model = replicated(torch.bfloat16)
    state = ub_overlap.ddp.HookState()
    model.register_comm_hook(state, ub_overlap.ddp.all_reduce_hook)
    plain = train(replicated(torch.bfloat16), rank, steps=1)[1]
    bad += ["bf16" for a, b in zip(train(model, rank, steps=1)[1], plain, strict=True) if not torch.allclose(a, b, rtol=1e-2)]
    return bad


def no_transport(rank: int, world: int) -> tuple[list[str], list[str]]:
    """On several hosts and in fp64 torch's all_reduce stays; with a wire dtype torch's compression."""
    bad = []
    with reset(), logged() as texts:
        C.testing.set_host_id(f"host{rank}:boot:1")
        options = {"process_group": dist.new_group(list(range(world)))}
        for wire in (None, torch.bfloat16):
            model = replicated(**options)
            ub_overlap.ddp.install(model, wire_dtype=wire)
            same = train(model, rank)[0] == train(replicated(), rank)[0]
            if same != (wire is None):
                bad.append(f"hosts {wire}")
    with logged() as wide:
        model = replicated(torch.float64)
        ub_overlap.ddp.install(model)
        if train(model, rank)[0] != train(replicated(torch.float64), rank)[0]:
            bad.append("float64")
    wrong = attempt(lambda: ub_overlap.ddp.install(replicated(), wire_dtype=torch.float32))
    if wrong["error"] != "OptionError":
        bad.append(str(wrong))
    return bad, [*texts, *wide]

"""Rank functions of test_ddp.py: DistributedDataParallel with our hook against torch's own all_reduce."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ub_overlap
from tests.harness.later_steps import compiled_before
from tests.runtime.rank_failures import attempt, fresh
from tests.runtime.rank_sessions import C, reset
from ub_overlap.runtime import settings
from ub_overlap.runtime.data_parallel import eager_collectives
from ub_overlap.runtime.functional.arena import initialize_group
from ub_overlap.runtime.schedule.steps import SLOTS
from ub_overlap.runtime.session.bind import find_session

from .rank_fsdp import Model, exact_grads, logged, loss_of


def replicated(dtype: torch.dtype = torch.float32, **options: Any) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(Model().to(dtype), bucket_cap_mb=0.004, **options)  # several buckets


def train(model: DistributedDataParallel, rank: int, steps: int = 3, micro: int = 1) -> tuple[list[float], list[torch.Tensor]]:
    """Return the losses and the gradients of the first step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, grads = [], list[torch.Tensor]()
    for step in range(steps):
        with compiled_before(step):
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


def landing_memory(rank: int, world: int, piece_bytes: int) -> tuple[list[bool], list[tuple[int, list[int], int]]]:
    """Train with pieces of at most `piece_bytes`.

    Return whether each gradient of the first step equals torch's, and after each of three steps: the bytes of its largest
    bucket, those of the landing memory of each slot, and the calls so far.
    """

    def make(**options: Any) -> DistributedDataParallel:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(255, 255) for _ in range(6)]  # 256 KiB each
        return DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.2, **options)

    def step(model: DistributedDataParallel) -> list[torch.Tensor]:
        model.zero_grad()
        x = torch.randn(8, 255, generator=torch.Generator().manual_seed(rank))
        model(x).square().sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    class Counted(ub_overlap.ddp.HookState):
        def _reduce(self, bucket: Any) -> Any:
            sizes.append(bucket.buffer().nbytes)
            return super()._reduce(bucket)

    before, eager_collectives.PIECE_BYTES = eager_collectives.PIECE_BYTES, piece_bytes
    C.clear_stats()
    try:
        own = make(process_group=dist.new_group(list(range(world))))
        state = Counted(own.process_group)
        own.register_comm_hook(state, ub_overlap.ddp.all_reduce_hook)
        found = []
        for count in range(3):
            sizes = list[int]()
            if count == 0:
                same = [torch.equal(a, b) for a, b in zip(step(own), step(make()), strict=True)]
            else:
                step(own)
            (name,) = state._groups.own_groups()
            session: Any = find_session(name, "cpu")
            slots = [session._arena.bytes_of_slot(SLOTS + slot) for slot in eager_collectives.REDUCE_SLOTS]
            calls = sum(site.calls for name, site in ub_overlap.site_stats().items() if name.startswith("/ddp."))
            found.append((max(sizes), slots, calls))
    finally:
        eager_collectives.PIECE_BYTES = before
    return same, found


def pieces_of_all_sizes(rank: int, world: int) -> list[str]:
    """Return the sizes whose sum in pieces is not bit by bit the sum in one piece."""
    name, bad = fresh(world), []
    initialize_group(name, 1, device=torch.device("cpu"))
    before = eager_collectives.PIECE_BYTES
    try:
        for numel in (0, 1, 511, 512, 513, 1024, 1025, 4097):
            for dtype in eager_collectives.REDUCED_DTYPES:
                term = torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)
                sums = []
                for eager_collectives.PIECE_BYTES in (before, 512 * dtype.itemsize):
                    sums.append(torch.empty_like(term))
                    eager_collectives.all_reduce_into(sums[-1], term, name, "/sum", op="avg", index=numel)
                if not torch.equal(*sums):
                    bad.append(f"{numel} {dtype}")
    finally:
        eager_collectives.PIECE_BYTES = before
    return bad


def late_between_pieces(rank: int, world: int, step_s: float) -> dict[str, Any]:
    """The last rank reduces the first of four pieces only. Return what the others raise."""
    name = fresh(world)
    initialize_group(name, 1, device=torch.device("cpu"))
    term = torch.ones(2048)
    before, eager_collectives.PIECE_BYTES = eager_collectives.PIECE_BYTES, 512 * term.itemsize
    with reset():
        settings.configure(step_timeout_s=step_s)
        try:
            part = term[:512] if rank == world - 1 else term
            return attempt(lambda: eager_collectives.all_reduce_into(part, part, name, "/ddp.bucket0"))
        finally:
            eager_collectives.PIECE_BYTES = before
            dist.barrier()

"""Rank functions of test_handles.py: collectives of eager code that are waited for later."""

from __future__ import annotations

import gc
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ub_overlap
from ub_overlap.runtime import settings
from ub_overlap.runtime.schedule.steps import HANDLE_SLOTS

from .rank_failures import attempt, fresh
from .rank_sessions import OPS, C, reset

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int8, torch.bool, torch.float8_e5m2)


def of_rank(rank: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def values(rank: int, world: int) -> list[str]:
    """Return what differs from fp64, or in bits where nothing is summed."""
    bad = []
    for dtype in DTYPES:
        shards = [(of_rank(r, 3, 4) * 50).to(dtype) for r in range(world)]
        got = ub_overlap.all_gather(shards[rank], async_op=True, site="g").wait()
        want = torch.cat(shards)
        if got.dtype != dtype or not torch.equal(got.view(torch.uint8), want.view(torch.uint8)):
            bad.append(f"all_gather {dtype}: {got} {want}")
    turned = torch.full((3,), 1 + 2j * rank).conj()  # a view whose numbers are conjugated when they are read
    if not torch.equal(ub_overlap.all_gather(turned), torch.cat([torch.full((3,), 1 - 2j * r) for r in range(world)])):
        bad.append("conjugated")
    column = of_rank(rank, 1, 4).t()  # contiguous, and its last stride is not 1
    if not torch.equal(ub_overlap.all_gather(column), torch.cat([of_rank(r, 1, 4).t() for r in range(world)])):
        bad.append("column")
    negated = torch.full((1,), 1 + 2j * rank, dtype=torch.complex128).conj().imag  # negated when it is read
    want = torch.arange(world, dtype=torch.float64) * -2
    if not torch.equal(ub_overlap.all_gather(negated), want):
        bad.append("negated")
    if not torch.equal(ub_overlap.all_to_all(negated.expand(world), [1] * world, [1] * world), want):
        bad.append("negated, exchanged")
    for dtype, out in ((torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, torch.float32)):
        for op in ("sum", "avg"):
            terms = [of_rank(r, 2 * world, 5).to(dtype) for r in range(world)]
            exact = torch.stack([t.double() for t in terms]).sum(0) / (world if op == "avg" else 1)
            options: dict[str, Any] = {"reduce_op": op, "out_dtype": out}
            scattered = ub_overlap.reduce_scatter(terms[rank].t().contiguous().t(), **options)  # strided
            reduced = ub_overlap.all_reduce(terms[rank], **options)
            eps = torch.finfo(out or dtype).eps
            for name, got, want in (("scatter", scattered, exact.chunk(world)[rank]), ("reduce", reduced, exact)):
                if got.dtype != (out or dtype) or not torch.allclose(got.double(), want, rtol=eps, atol=4 * world * 2**-24):
                    bad.append(f"{name} {dtype} {out} {op}: {(got - want).abs().max()}")
    return bad


def in_between(rank: int, world: int) -> list[str]:
    """Open two handles, run other calls of the group and a compiled graph with split collectives, wait in another order."""
    import torch.distributed._functional_collectives as funcol

    name = fresh(world)
    made = torch.Generator().manual_seed(0)
    x, w = torch.randn(8, 16, generator=made), torch.randn(16, 16, generator=made)
    gathered = ub_overlap.all_gather(x + rank, name, async_op=True, site="a")
    total = ub_overlap.all_reduce(torch.full((4,), float(rank)), name, async_op=True, site="b")

    def step(t: Tensor) -> Tensor:
        return funcol.reduce_scatter_tensor(funcol.all_gather_tensor(t, 0, name) @ w, "sum", 0, name)

    options = {"inner": "aot_eager", "overlap": "force", "overrides": [{"strategy": "split"}]}
    with torch.no_grad():
        got = torch.compile(step, backend="ub_overlap", options=options)(x)
        ours = ub_overlap.all_gather_matmul(x, w, name)
    bad = [] if torch.allclose(got, step(x), atol=1e-4) else ["the compiled graph"]
    bad += [] if torch.allclose(ours, torch.cat([x] * world) @ w, atol=1e-4) else ["the op"]
    bad += [] if repr(total) == "<open all_reduce at site '/b'>" else [repr(total)]
    bad += [] if torch.equal(total.wait(), torch.full((4,), sum(range(world)), dtype=torch.float32)) else ["all_reduce"]
    first = gathered.wait()
    bad += [] if first is gathered.wait() and first.shape == (8 * world, 16) else ["a second wait"]
    bad += [] if torch.equal(first[rank * 8 : rank * 8 + 8], x + rank) else ["all_gather"]
    return bad


def misuse(rank: int, world: int) -> list[str]:
    """Return the errors of wrong calls. Nothing is sent."""
    name, x = fresh(world), torch.ones(4, 4)
    found = [
        attempt(lambda: ub_overlap.all_gather(x.clone().requires_grad_(), name)),
        attempt(lambda: ub_overlap.all_gather(torch.ones((), dtype=torch.int64), name)),
        attempt(lambda: ub_overlap.all_reduce(x.long(), name)),
        attempt(lambda: ub_overlap.all_reduce(x, name, reduce_op="max")),
        attempt(lambda: ub_overlap.reduce_scatter(torch.ones(2 * world + 1, 2), name)),
    ]
    handles = [ub_overlap.all_gather(x, name, async_op=True, site=f"h{i}") for i in range(len(HANDLE_SLOTS))]
    found.append(attempt(lambda: ub_overlap.all_gather(x, name, site="one more")))
    results = [h.wait() for h in handles]
    assert all(torch.equal(r, torch.ones(4 * world, 4)) for r in results)
    ub_overlap.all_gather(x, name)  # the slots are free again
    return [f"{f['error']}: {f['text']}" for f in found]


def dropped(rank: int, world: int) -> dict[str, Any]:
    """Drop handles without a wait, more than there are slots. Then hold the first of all, so that none can be finished.

    The ranks let go of them at different times, which changes nothing.
    """
    name, x, kept = fresh(world), torch.arange(4.0), []
    for i in range(2 * len(HANDLE_SLOTS)):
        handle = ub_overlap.all_reduce(x + i, name, async_op=True, site=f"dropped{i}")
        kept = [handle] if rank == 0 else []
    del handle, kept
    gc.collect()
    held = ub_overlap.all_gather(x, name, async_op=True, site="held")
    for i in range(1, len(HANDLE_SLOTS)):
        ub_overlap.reduce_scatter(torch.ones(2 * world), name, async_op=True, site=f"later{i}")
    gc.collect()
    found = attempt(lambda: ub_overlap.all_gather(x, name, site="one more"))
    assert torch.equal(held.wait(), torch.cat([x] * world))
    assert torch.equal(ub_overlap.all_reduce(x, name), world * x)
    return found


def closed_while_open(rank: int, world: int) -> float:
    """Rank 0 closes a group whose slot rank 1 has not left, so that a push still waits. Return the seconds that takes."""
    name, x = fresh(world), torch.ones(2)
    with reset():
        settings.configure(step_timeout_s=20)
        first = ub_overlap.all_gather(x, name, async_op=True)
        if rank == 0:
            first.wait()
            ub_overlap.all_gather(x, name, async_op=True)
        begin = time.monotonic()
        if rank == 0:
            C.close(name, "cpu")
        seconds = time.monotonic() - begin
        dist.barrier()
    return seconds


def late_peer(rank: int, world: int, step_s: float) -> dict[str, Any]:
    """The last rank never starts. The wait of the others names it and the site."""
    name = fresh(world)
    with reset():
        settings.configure(step_timeout_s=step_s)
        ub_overlap.all_gather(torch.ones(2), name, site="warm")
        found: dict[str, Any] = {}
        if rank < world - 1:
            handle = ub_overlap.all_gather(torch.ones(2), name, async_op=True, site="late")
            found = attempt(handle.wait)
        dist.barrier()
    return found


def returns_early(rank: int, world: int, late_s: float) -> tuple[float, float]:
    """The last rank starts late. Return the seconds of the start and of the wait on the other ranks."""
    name = fresh(world)
    OPS.bulk(torch.ones(2), [], [], "all_gather", "sum", torch.float32, "bulk", name, "/warm")
    ub_overlap.all_gather(torch.ones(2), name)
    dist.barrier()
    if rank == world - 1:
        time.sleep(late_s)
    begun = time.monotonic()
    handle = ub_overlap.all_gather(torch.ones(2), name, async_op=True)
    started = time.monotonic()
    handle.wait()
    return started - begun, time.monotonic() - started

"""Rank functions of test_split.py: several split collectives open at once, with other calls between, delays and faults."""

from __future__ import annotations

import os
import random
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

import ub_overlap
from ub_overlap.runtime import errors, ops, settings
from ub_overlap.runtime.schedule.encode import COPY, WAIT
from ub_overlap.runtime.schedule.encode import provide as proven
from ub_overlap.runtime.schedule.steps import SPLIT_SLOTS

from . import rank_ops
from .oracle import data
from .rank_failures import attempt, fresh
from .rank_sessions import OPS, C, gather, reset, scatter

COPY_QUEUE = 1
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")


def start(name: str, collective: str, shard: torch.Tensor, slot: int = 0, **options: Any) -> torch.Tensor:
    return OPS.start_collective(shard, *arguments(name, collective, shard, slot, options))


def finish(name: str, collective: str, token: torch.Tensor, shard: torch.Tensor, slot: int = 0, **options: Any) -> torch.Tensor:
    return OPS.finish_collective(token, shard, *arguments(name, collective, shard, slot, options))


def release(name: str, gathered: torch.Tensor, slot: int = 0, **options: Any) -> None:
    OPS.release_collective(gathered, slot, options.get("strategy", "bulk"), name, options.get("site", f"/split.{slot}"))


def arguments(name: str, collective: str, shard: torch.Tensor, slot: int, options: dict[str, Any]) -> tuple[Any, ...]:
    """Return all arguments but the tensors. options: dtype of the result, strategy, site, zero_copy."""
    strategy, site = options.get("strategy", "bulk"), options.get("site", f"/split.{slot}")
    zero_copy = options.get("zero_copy", False)
    return collective, "sum", options.get("dtype", shard.dtype), slot, zero_copy, strategy, name, site


def whole(name: str, collective: str, shard: torch.Tensor) -> torch.Tensor:
    """Run the same schedule in one piece."""
    return OPS.bulk(shard, [], [], collective, "sum", shard.dtype, "bulk", name, "/bulk")[0]


def into(name: str, collective: str, shard: torch.Tensor, rank: int) -> torch.Tensor:
    """Finish into given memory: that of the input for an all_reduce, around the input for an all_gather."""
    want = whole(name, collective, shard)
    out = shard.clone(memory_format=torch.contiguous_format) if collective == "all_reduce" else torch.empty_like(want)
    if collective == "all_reduce":
        shard = out
    elif collective == "all_gather":
        place = out.narrow(0, rank * shard.shape[0], shard.shape[0])
        shard = place.copy_(shard)
    arguments_of_start = arguments(name, collective, shard, 0, {})
    token = OPS.start_collective(shard, *arguments_of_start)
    OPS.finish_collective_into(token, shard, out, *arguments_of_start[:2], arguments_of_start[3], *arguments_of_start[5:])
    return out


def expected(
    rank: int, world: int, collective: str, shape: tuple[int, ...], seed: int, dtype: torch.dtype, out_dtype: torch.dtype
) -> torch.Tensor:
    """Compute the result from all ranks' inputs: sums in fp32 in rank order, rounded once."""
    shards = [data(*shape, seed=seed + r).to(dtype) for r in range(world)]
    if collective == "all_gather":
        return torch.cat(shards)
    total = shards[0].float()
    for shard in shards[1:]:
        total = total + shard.float()
    rows = shape[0] // world
    return (total if collective == "all_reduce" else total[rank * rows : (rank + 1) * rows]).to(out_dtype)


def random_program(rank: int, world: int, times: int, delay_us: int, seed: int) -> list[str]:
    """Start, finish, release and run other calls in a random order, the same on all ranks, with random delays. Compare bit by
    bit, the results of zero-copy gathers when they are finished and when they are released."""
    name, bad = rank_ops.group(), []
    order = random.Random(seed)
    opened: dict[int, tuple[Any, ...]] = {}
    held: dict[int, tuple[Any, ...]] = {}

    def end(slot: int) -> None:
        if slot in held:
            result, want, options = held.pop(slot)
            same = torch.equal(result, want)
            release(name, result, slot, **options)
        else:
            collective, token, shard, want, options = opened.pop(slot)
            result = finish(name, collective, token, shard, slot, **options)
            same = torch.equal(result, want)
            if options["zero_copy"]:
                held[slot] = result, want, options
        if not same:
            bad.append(f"slot {slot} at step {step}")

    with reset():
        C.testing.set_random_delay(delay_us, 7 * rank + seed)
        for step in range(times):
            slot, what = order.randrange(4), order.randrange(6)
            collective, dtype = order.choice(COLLECTIVES), order.choice((torch.float32, torch.bfloat16))
            rows, grows = order.randrange(1, 5) * world, order.random() < 0.05
            options: dict[str, Any] = {"strategy": order.choice(("bulk", f"bulk:chunks={2 * world}"))}
            options["dtype"] = dtype if collective == "all_gather" else order.choice((dtype, torch.float32))
            options["zero_copy"] = order.random() < 0.5 and collective == "all_gather"
            if what == 0:
                bad += gather(name, rank, world, 5, seed=step)
            elif what == 1:
                bad += scatter(name, rank, world, 4, seed=step)
            elif what == 2 and (opened or held):
                end(order.choice(sorted({**opened, **held})))
            else:
                while slot in opened or slot in held:
                    end(slot)
                shape = (rows, 40_000 if grows else 7)  # a larger slot: it grows while others are open
                shard = data(*shape, seed=step + rank).to(dtype)
                want = expected(rank, world, collective, shape, step, dtype, options["dtype"])
                token = start(name, collective, shard, slot, **options)
                opened[slot] = (collective, token, shard, want, options)
        for slot in sorted({**opened, **held}):
            while slot in opened or slot in held:
                end(slot)
    return bad[:5]


def equals_bulk(rank: int, world: int) -> list[str]:
    """A split collective equals bulk and, where nothing is summed, c10d bit by bit. Strided inputs are copied first."""
    name, bad = rank_ops.group(), []
    for collective in COLLECTIVES:
        for shard in (data(3 * world, 5, seed=rank), data(5, 3 * world, seed=rank).t(), data(2 * world, seed=rank).half()):
            token = start(name, collective, shard)
            assert (token.shape, token.dtype) == ((1,), torch.uint8)
            if not torch.equal(finish(name, collective, token, shard), whole(name, collective, shard)):
                bad.append(f"{collective} {tuple(shard.shape)}")
            if not torch.equal(into(name, collective, shard, rank), whole(name, collective, shard)):
                bad.append(f"{collective} into given memory {tuple(shard.shape)}")
    shard = data(3, 5, seed=rank)
    out = finish(name, "all_gather", start(name, "all_gather", shard), shard)
    plain = shard.new_empty(3 * world, 5)
    dist.all_gather_into_tensor(plain, shard)
    none = {"strategy": "none"}
    fallback = finish(name, "all_gather", start(name, "all_gather", shard, **none), shard, **none)
    return bad + [f"{what} differs from c10d" for what, t in (("split", out), ("none", fallback)) if not torch.equal(t, plain)]


def misuse(rank: int, world: int) -> list[dict[str, Any]]:
    """Errors of one rank's own program: all ranks get them, and the group stays usable."""
    name, shard = fresh(world), data(4, 4, seed=rank)
    found = [attempt(lambda: finish(name, "all_gather", shard, shard))]
    token = start(name, "all_gather", shard)
    found.append(attempt(lambda: start(name, "all_gather", shard, site="/second")))
    found.append(attempt(lambda: finish(name, "all_gather", token, shard, site="/second")))
    found.append(attempt(lambda: start(name, "all_gather", shard, SPLIT_SLOTS)))
    found.append(attempt(lambda: start(name, "all_gather", shard, 1, strategy="direct")))
    given = ("all_gather", "sum", 0, "bulk", name, "/split.0")
    found.append(attempt(lambda: OPS.finish_collective_into(token, shard, torch.empty(4, 4), *given)))
    found.append(attempt(lambda: start(name, "all_reduce", shard, 1, zero_copy=True)))
    out = finish(name, "all_gather", token, shard)
    good = torch.equal(out, torch.cat([data(4, 4, seed=r) for r in range(world)]))
    return [*found, {"error": "" if good else "wrong"}]


def misuse_of_zero_copy(rank: int, world: int) -> list[dict[str, Any]]:
    """The same for a result that is released too early, twice, or from another site. Also a gather of empty shards."""
    name, shard = fresh(world), data(4, 4, seed=rank)
    token = start(name, "all_gather", shard, zero_copy=True)
    found = [attempt(lambda: release(name, shard))]
    gathered = finish(name, "all_gather", token, shard, zero_copy=True)
    found.append(attempt(lambda: start(name, "all_gather", shard)))
    found.append(attempt(lambda: finish(name, "all_gather", shard, shard, zero_copy=True)))
    found.append(attempt(lambda: release(name, gathered, site="/second")))
    kept = gathered.clone()
    release(name, gathered)
    found.append(attempt(lambda: release(name, gathered)))
    empty = finish(name, "all_gather", start(name, "all_gather", shard[:0], zero_copy=True), shard[:0], zero_copy=True)
    release(name, empty)
    good = torch.equal(kept, torch.cat([data(4, 4, seed=r) for r in range(world)])) and empty.shape == (0, 4)
    return [*found, {"error": "" if good else "wrong"}]


def is_landing_memory(rank: int, world: int) -> list[str]:
    """The results of one slot are at one address. Those of plain c10d, and of copied gathers, are tensors of their own."""
    name, shard, bad = fresh(world), data(4, 4, seed=rank), []
    plain = torch.cat([data(4, 4, seed=r) for r in range(world)])
    for options, in_place in (({"zero_copy": True}, True), ({}, False), ({"zero_copy": True, "strategy": "none"}, False)):
        results = []
        for _ in range(2):
            results.append(finish(name, "all_gather", start(name, "all_gather", shard, **options), shard, **options))
            if not torch.equal(results[-1], plain) or not results[-1].is_contiguous():
                bad.append(f"{options}: wrong")
            if options:
                release(name, results[-1], **options)
        if (results[0].data_ptr() == results[1].data_ptr()) != in_place:
            bad.append(f"{options}: the addresses of two results")
    return bad


def never_releases(rank: int, world: int, step_s: float, dies: bool) -> dict[str, Any]:
    """The last rank leaves between finish and release, by an exception or `dies`. The next start of the slot, and then the
    peers, name it. Other calls go on meanwhile."""
    name, shard = fresh(world), data(4, 4, seed=rank)
    with reset():
        settings.configure(step_timeout_s=step_s)
        gathered = finish(name, "all_gather", start(name, "all_gather", shard, zero_copy=True), shard, zero_copy=True)
        if rank != world - 1:
            release(name, gathered)
        elif dies:
            os._exit(0)
        other = [] if dies else gather(name, rank, world, 4)

        def again() -> None:
            token = start(name, "all_gather", shard, zero_copy=True)
            finish(name, "all_gather", token, shard, zero_copy=True)

        found = attempt(again)
        if not dies:
            dist.barrier()
        return {"other": other, **found}


def never_finishes(rank: int, world: int, step_s: float) -> dict[str, Any]:
    """The last rank starts and never finishes. Peers finish, and their next use of the slot names it."""
    name, shard = fresh(world), data(4, 4, seed=rank)
    with reset():
        settings.configure(step_timeout_s=step_s)
        token = start(name, "all_gather", shard)
        first = attempt(lambda: rank == world - 1 or finish(name, "all_gather", token, shard))
        other = gather(name, rank, world, 4)  # calls between are not hindered

        def again() -> None:
            if rank != world - 1:
                finish(name, "all_gather", start(name, "all_gather", shard), shard)

        found = attempt(again)
        dist.barrier()
        return {"first": first["error"], "other": other, **found}


def never_starts(rank: int, world: int, step_s: float) -> dict[str, Any]:
    """The last rank skips a start and its finish, after one that it made."""
    name, shard = fresh(world), data(4, 4, seed=rank)
    with reset():
        settings.configure(step_timeout_s=step_s)
        finish(name, "all_gather", start(name, "all_gather", shard), shard)
        found = attempt(lambda: rank == world - 1 or finish(name, "all_gather", start(name, "all_gather", shard), shard))
        dist.barrier()
        return found


def other_order(rank: int, world: int, same_slot: bool, step_s: float) -> dict[str, Any]:
    """Rank 1 runs two collectives in the other order."""
    name, shard = fresh(world), data(4, 4, seed=rank)
    with reset():
        settings.configure(step_timeout_s=step_s)
        finish(name, "all_gather", start(name, "all_gather", shard), shard)
        finish(name, "all_gather", start(name, "all_gather", shard, 1), shard, 1)

        def body() -> None:
            for number in (1, 0) if rank == 1 else (0, 1):
                slot, of = 0 if same_slot else number, {"site": f"/order.{number}"}
                finish(name, "all_gather", start(name, "all_gather", shard, slot, **of), shard, slot, **of)

        found = attempt(body)
        dist.barrier()
        return found


def other_site_grows(rank: int, world: int, same_slot: bool) -> dict[str, Any]:
    """The last rank is at another site when the slot of a first start gets its landing memory. The sizes are equal.

    Rank 1 comes last: until then one rank is at each site.
    """
    name, shard = fresh(world), data(4, 4, seed=rank)
    number = int(rank == world - 1)
    gather(name, rank, world, 4)  # sets up the session, which all ranks do together
    if rank == 1:
        time.sleep(0.3)
    found = attempt(lambda: start(name, "all_gather", shard, 0 if same_slot else number, site=f"/order.{number}"))
    dist.barrier()
    return found


def dies_between(rank: int, world: int, step_s: float) -> dict[str, Any]:
    """Rank 1 ends between the start and the finish of an all_reduce, whose second phase needs it."""
    name, shard = fresh(world), data(4, 4, seed=rank)
    settings.configure(step_timeout_s=step_s)
    gather(name, rank, world, 4)
    token = start(name, "all_reduce", shard)
    if rank == 1:
        os._exit(0)
    return attempt(lambda: finish(name, "all_reduce", token, shard))


def left_open(rank: int, world: int) -> list[str]:
    """A group is destroyed while a collective is open."""
    group: Any = dist.new_group(list(range(world)))
    shard = data(4, 4, seed=rank)
    start(group.group_name, "all_gather", shard)
    dist.barrier()
    dist.destroy_process_group(group)
    C.close_destroyed_groups()
    return gather(rank_ops.group(), rank, world, 4)


def fake_sizes(rank: int, world: int, collective: str) -> tuple[int, ...]:
    with FakeTensorMode():
        shard = torch.empty(8, 3)
        token = start(rank_ops.group(), collective, shard)
        return tuple(finish(rank_ops.group(), collective, token, shard).shape)


def compiled(rank: int, world: int) -> list[str]:
    """A graph with two open collectives gives the results of eager code."""
    name = rank_ops.group()

    def step(weight: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        token = start(name, "all_gather", weight)
        grad = x.t() @ x
        second = start(name, "reduce_scatter", grad, 1)
        full = finish(name, "all_gather", token, weight)
        return x @ full.t(), finish(name, "reduce_scatter", second, grad, 1)

    weight, x = data(3, 2 * world, seed=rank), data(4, 2 * world, seed=rank + 9)
    got = torch.compile(step, backend="aot_eager", fullgraph=True)(weight, x)
    return [f"result {i}" for i, (a, b) in enumerate(zip(got, step(weight, x), strict=True)) if not torch.equal(a, b)]


def without_done(rank: int, world: int, waits: bool, zero_copy: bool, times: int) -> list[str]:
    """Run gathers in one slot. Rank 0 reads late and rank 1, which waits for no data, runs ahead.

    `waits`: keep the waits for a free slot, else remove them.
    """

    def provide(key: tuple[Any, ...], me: int) -> list[tuple[int, ...]]:
        rows = proven(key, me)
        frees = [i for i, row in enumerate(rows) if row[0] == WAIT and row[1] == COPY_QUEUE]
        deaf = [i for i, row in enumerate(rows) if row[0] == WAIT and row[1] != COPY_QUEUE and me == 1]
        return [row for i, row in enumerate(rows) if i not in deaf and (waits or i not in frees)]

    name, bad = fresh(world), []
    C.set_provider(provide)
    try:
        with reset():
            settings.configure(step_timeout_s=10.0)
            if not zero_copy:
                rows = provide(("split_all_gather", world, 0, (), 0, 0, False, False), rank)
                late = max(i for i, row in enumerate(rows) if row[0] == COPY)  # of the peer's shard, on COMPUTE
                C.testing.set_step_delays({late: 20_000}, only_rank=0)
            options = {"zero_copy": zero_copy}
            for i in range(times):
                shards = [data(6, 4, seed=10 * i + r) for r in range(world)]
                token = start(name, "all_gather", shards[rank], **options)
                out = finish(name, "all_gather", token, shards[rank], **options)
                if zero_copy and rank == 0:
                    time.sleep(0.02)
                if rank == 0 and not torch.equal(out, torch.cat(shards)):
                    bad.append(f"call {i}")
                if zero_copy:
                    release(name, out)
    except errors.UbOverlapError as error:
        bad.append(f"{type(error).__name__}: {error}")
    finally:
        C.set_provider(ops.ScheduleProvider())
        dist.barrier()
    return bad


def traced(rank: int, world: int, zero_copy: bool) -> list[tuple[str, str]]:
    """Return queue and kind of the steps of a traced split collective."""
    name, shard, options = rank_ops.group(), data(4, 4, seed=rank), {"site": "/traced", "zero_copy": zero_copy}
    with reset():
        settings.configure(trace=True)
        gathered = finish(name, "all_gather", start(name, "all_gather", shard, **options), shard, **options)
        if zero_copy:
            release(name, gathered, **options)
        return [(queue, kind) for _, queue, kind, *_ in C.last_trace("/traced")]


def hidden_bytes(rank: int, world: int, between_s: float) -> tuple[int, float]:
    """Return the bytes that a split gather copied, and those before its finish began. Copies take `between_s` at least."""
    name, shard = fresh(world), data(256, 64, seed=rank)
    whole(name, "all_gather", shard)
    C.clear_stats()
    token = start(name, "all_gather", shard)
    time.sleep(between_s)
    finish(name, "all_gather", token, shard)
    stats = C.site_stats()["/split.0"]
    return stats["bytes_copied"], stats["bytes_overlapped"]


def aborted_in_finish(rank: int, world: int) -> list[dict[str, Any]]:
    """Rank 0 waits in a finish and is aborted from another thread. The others start late. Return the errors of both ranks."""
    group = dist.new_group(list(range(world)))
    name, shard = group.group_name, data(4, 4, seed=rank)
    with reset():
        settings.configure(step_timeout_s=60.0)
        gather(name, rank, world, 4)
        finish(name, "all_gather", start(name, "all_gather", shard), shard)
        dist.barrier()
        found: list[dict[str, Any]] = []
        if rank == 0:
            thread = threading.Timer(0.5, ub_overlap.abort, (group,), {"reason": "the scheduler said so"})
            thread.start()
            found = [attempt(lambda: finish(name, "all_gather", start(name, "all_gather", shard), shard))]
            thread.join()
        dist.barrier()
        if rank > 0:
            found = [attempt(lambda: gather(name, rank, world, 4))]
        return found

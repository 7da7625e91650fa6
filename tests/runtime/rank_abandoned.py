"""Rank functions of test_abandoned.py: exceptions between the start and the finish of a split collective."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

import ub_overlap
from ub_overlap.runtime import errors, settings
from ub_overlap.runtime.schedule.steps import HANDLE_SLOTS

from .oracle import data
from .rank_all_to_all import exchange, sides
from .rank_all_to_all import start as start_exchange
from .rank_failures import attempt, fresh
from .rank_sessions import OPS, gather, reset
from .rank_split import COLLECTIVES, finish, release, start


class Stopped(Exception):
    """The exception of a program between start and finish."""


@torch.library.custom_op("ub_overlap_tests::stop", mutates_args=())
def stop(x: Tensor, do: Tensor) -> Tensor:
    """Return a copy of `x`, or raise where `do` is not 0."""
    if bool(do):
        raise Stopped("in between")
    return x.clone()


@stop.register_fake
def _(x: Tensor, do: Tensor) -> Tensor:
    return torch.empty_like(x)


def leave(begin: Callable[[], Any]) -> None:
    """Start a collective, and raise. The exception is handled, so its traceback is freed."""
    try:
        token = begin()
        raise Stopped(str(token))
    except Stopped:
        pass


def whole(name: str, collective: str, shard: Tensor, slot: int, **options: Any) -> Tensor:
    """Start, finish and, of a zero-copy gather, release."""
    token = start(name, collective, shard, slot, **options)
    result = finish(name, collective, token, shard, slot, **options).clone()
    if options.get("zero_copy"):
        release(name, shard, slot, **options)
    return result


def finished(name: str, shard: Tensor, **options: Any) -> Tensor:
    """Return the result of a zero-copy gather, which is not released."""
    return finish(name, "all_gather", start(name, "all_gather", shard, **options), shard, **options)


def all_leave(rank: int, world: int, strategy: str) -> list[str]:
    """Leave each kind of collective open on all ranks, then use its slot. Return what differs from a plain collective."""
    name, bad, options = fresh(world), [], {"strategy": strategy}
    zero_copy = {"zero_copy": True, **options}
    tensors = [data(2, 3, seed=rank), data(5, seed=rank).bfloat16()]
    coalesced = ("all_gather", "sum", [x.dtype for x in tensors], 1, False, strategy, name, "/coalesced")
    in_place = (*coalesced[:4], strategy == "bulk", *coalesced[5:])
    sent, out, of, theirs = sides(rank, [[10 * s + d for d in range(world)] for s in range(world)])
    shard, want = tensors[0], torch.cat([data(2, 3, seed=r) for r in range(world)])
    for turn in range(2):
        for slot, collective in enumerate(COLLECTIVES):
            old, new = data(2 * world, 3, seed=rank), data(2 * world, 3, seed=10 + rank + turn)
            leave(partial(start, name, collective, old, slot, **options))
            plain = OPS.bulk(new, [], [], collective, "sum", new.dtype, "bulk", name, "/want")[0]
            if not torch.equal(whole(name, collective, new, slot, **options), plain):
                bad.append(f"{collective}, turn {turn}")
        for begin in (partial(start, name, "all_gather", shard), partial(finished, name, shard)):
            leave(partial(begin, **zero_copy))
            if not torch.equal(whole(name, "all_gather", shard, 0, **zero_copy), want):
                bad.append(f"zero-copy, turn {turn}")
        leave(partial(start_exchange, name, sent, out, of, **options))
        if not torch.equal(exchange(name, sent, out, of, **options), theirs):
            bad.append(f"all_to_all, turn {turn}")
        leave(partial(OPS.start_coalesced, tensors, *coalesced))
        got = OPS.finish_coalesced(OPS.start_coalesced(tensors, *coalesced), tensors, *coalesced)
        if not torch.equal(got[0], want):
            bad.append(f"coalesced, turn {turn}")
        begin = partial(OPS.start_coalesced, tensors, *in_place)
        for make in (begin, lambda begin=begin: OPS.finish_coalesced(begin(), tensors, *in_place)):
            leave(make)
            got = OPS.finish_coalesced(begin(), tensors, *in_place)
            if not torch.equal(got[0], want):
                bad.append(f"zero-copy coalesced, turn {turn}")
            OPS.release_coalesced(got, 1, *in_place[5:])
    return bad + gather(name, rank, world, 4)


def one_leaves(rank: int, world: int, collective: str, strategy: str, step_s: float) -> dict[str, Any]:
    """Only the last rank leaves a collective open. The others finish it and go on."""
    name, shard, options = fresh(world), data(2 * world, 3, seed=rank), {"strategy": strategy}
    with reset():
        settings.configure(step_timeout_s=step_s)
        gather(name, rank, world, 4)

        def program() -> None:
            if rank == world - 1:
                leave(lambda: start(name, collective, shard, **options))
            else:
                whole(name, collective, shard, 0, **options)
            whole(name, collective, shard, 0, **options)

        found = attempt(program)
        dist.barrier()
        return found


def one_holds_its_exception(rank: int, world: int, strategy: str) -> dict[str, Any]:
    """All ranks raise. On the last one the exception lives on, and so does the token, until the second attempt."""
    name, shard, held = fresh(world), data(4, 3, seed=rank), []

    def body() -> None:
        token = start(name, "all_gather", shard, strategy=strategy)
        raise Stopped(str(token.shape))

    with reset():
        settings.configure(step_timeout_s=30)  # rank 0 waits for the second attempt of a busy machine
        try:
            body()
        except Stopped as error:
            held = [error] if rank == world - 1 else []
        found = {}
        if held:
            found = attempt(lambda: start(name, "all_gather", shard, strategy=strategy))
            held.append(held)  # a cycle
            held = []
        got = whole(name, "all_gather", shard, 0, strategy=strategy)
    return {"good": torch.equal(got, torch.cat([data(4, 3, seed=r) for r in range(world)])), **found}


def others_left(rank: int, world: int, strategy: str) -> dict[str, Any]:
    """The ranks leave different collectives open in one slot, whose landing memory has its size from a call before."""
    name, shard = fresh(world), data(4, 3, seed=rank)
    whole(name, "all_gather", shard, 0, site="/first", strategy=strategy)
    leave(lambda: start(name, "all_gather", shard, site=f"/left.{rank}", strategy=strategy))
    found = attempt(lambda: start(name, "all_gather", shard, site="/next", strategy=strategy))
    dist.barrier()
    return found


def in_a_graph(rank: int, world: int, who: str, step_s: float) -> dict[str, Any]:
    """A compiled step raises between start and finish, on all ranks or on the last one. Then run it as usual."""
    name = fresh(world)
    x, w = data(8, 16, seed=rank), data(16, 16, seed=7)

    def step(x: Tensor, w: Tensor, do: Tensor) -> Tensor:
        gathered = funcol.all_gather_tensor(x, 0, name)
        return gathered @ stop(w @ w, do)

    options = {"inner": "aot_eager", "overlap": "force", "overrides": [{"strategy": "split"}]}
    compiled = torch.compile(step, backend="ub_overlap", options=options, fullgraph=True)
    no, yes = torch.zeros(()), torch.ones(())
    want = torch.cat([data(8, 16, seed=r) for r in range(world)]) @ (w @ w)
    found: dict[str, Any] = {"good": torch.allclose(compiled(x, w, no), want, atol=1e-4)}
    with reset():
        settings.configure(step_timeout_s=step_s)
        raises = who == "all" or rank == world - 1
        found["first"] = attempt(lambda: compiled(x, w, yes if raises else no))["error"]
        found |= attempt(lambda: [compiled(x, w, no) for _ in range(2)])
        found["again"] = not found["error"] and torch.allclose(compiled(x, w, no), want, atol=1e-4)
        dist.barrier()
    torch._dynamo.reset()
    return found


def between_handle_and_wait(rank: int, world: int, who: str, step_s: float) -> dict[str, Any]:
    """An exception between the start and the wait of a handle, on all ranks or on the last one, more often than slots."""
    name, x = fresh(world), torch.arange(4.0) + rank
    raises = who == "all" or rank == world - 1

    def step() -> Tensor:
        handle = ub_overlap.all_gather(x, name, async_op=True, site="left")
        if raises:
            raise Stopped(repr(handle))
        return handle.wait()

    found: dict[str, Any] = {"error": "", "notes": []}
    with reset():
        settings.configure(step_timeout_s=step_s)
        gather(name, rank, world, 4)
        for _ in range(2 * len(HANDLE_SLOTS)):
            try:
                with contextlib.suppress(Stopped):
                    step()
                found["good"] = torch.equal(ub_overlap.all_reduce(torch.ones(2), name), torch.full((2,), float(world)))
            except errors.RankError as error:
                found = {"error": type(error).__name__, "ranks": error.ranks, "notes": getattr(error, "__notes__", [])}
                break
        dist.barrier()
    return found

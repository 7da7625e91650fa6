"""Rank functions of test_coalesced.py: split collectives of several tensors."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import ub_overlap
from ub_overlap.runtime.ops import DEFINITIONS

from .oracle import data
from .rank_failures import attempt, fresh
from .rank_sessions import OPS, C, reset
from .rank_split import COLLECTIVES

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def arguments(name: str, collective: str, tensors: list[Tensor], slot: int = 0, **options: Any) -> tuple[Any, ...]:
    """Return all arguments but the tensors. options: dtypes of the results, reduce_op, zero_copy, strategy, site."""
    dtypes = options.get("dtypes", [x.dtype for x in tensors])
    strategy, site = options.get("strategy", "bulk"), options.get("site", f"/coalesced.{slot}")
    return collective, options.get("reduce_op", "sum"), dtypes, slot, options.get("zero_copy", False), strategy, name, site


def alone(name: str, tensor: Tensor, collective: str, reduce_op: str, dtype: torch.dtype, strategy: str) -> Tensor:
    """Run the collective of one tensor of a coalesced collective."""
    return OPS.bulk(tensor, [], [], collective, reduce_op, dtype, strategy, name, "/alone")[0]


def random_tensors(order: random.Random, rank: int, world: int, collective: str) -> list[Tensor]:
    """Return one to five tensors of random sizes and dtypes, some empty, some strided."""
    tensors = []
    for number in range(order.randint(1, 5)):
        rows, cols = order.choice((0, 1, 2, 7, 300)), order.choice((0, 1, 3, 64))
        rows *= world if collective == "reduce_scatter" else 1
        tensor = data(rows, cols, seed=100 * number + rank).to(order.choice(DTYPES))
        tensors.append(tensor.t().contiguous().t() if order.random() < 0.3 else tensor)
    return tensors


def equals_single(rank: int, world: int, times: int, strategy: str) -> list[str]:
    """Collectives of random tensors in two slots, with delays and calls of the group between; equal in bits to single ones."""
    name, order, bad = fresh(world), random.Random(5), []
    opened: dict[int, Any] = {}

    def end(slot: int) -> None:
        token, tensors, args, want = opened.pop(slot)
        results = OPS.finish_coalesced(token, tensors, *args)
        for number, (got, exact) in enumerate(zip(results, want, strict=True)):
            if got.dtype != exact.dtype or got.shape != exact.shape or not torch.equal(got, exact):
                bad.append(f"{args}: tensor {number} of {[list(x.shape) for x in tensors]}")
        if args[4]:
            OPS.release_coalesced(results, slot, *args[5:])

    with reset():
        C.testing.set_random_delay(200, 7 * rank)
        for _ in range(times):
            slot, collective = order.randrange(2), order.choice(COLLECTIVES)
            if slot in opened:
                end(slot)
                continue
            tensors = random_tensors(order, rank, world, collective)
            dtypes = [x.dtype if collective == "all_gather" else order.choice(DTYPES) for x in tensors]
            reduce_op = order.choice(("sum", "avg"))
            chunks = order.choice(("bulk", "bulk:chunks=5")) if strategy == "bulk" else strategy
            zero_copy = collective == "all_gather" and order.random() < 0.6
            args = arguments(
                name, collective, tensors, slot, dtypes=dtypes, reduce_op=reduce_op, strategy=chunks, zero_copy=zero_copy
            )
            token = OPS.start_coalesced(tensors, *args)
            want = [alone(name, x, collective, reduce_op, dtype, strategy) for x, dtype in zip(tensors, dtypes, strict=True)]
            opened[slot] = (token, tensors, args, want)
        for slot in sorted(opened):
            end(slot)
    return bad


def in_landing_memory(rank: int, world: int) -> dict[str, Any]:
    """Compare the places of the results of two zero-copy collectives in one slot, then leave and misuse them."""
    name, tensors = fresh(world), [data(3, 4, seed=rank), data(5, seed=rank).bfloat16()]
    pairs = [(data(3, 4, seed=r), data(5, seed=r).bfloat16()) for r in range(world)]
    want = [torch.cat(parts) for parts in zip(*pairs, strict=True)]
    args = arguments(name, "all_gather", tensors, zero_copy=True)
    own = args[5:]
    places, right = [], []
    for _ in range(2):
        gathered = OPS.finish_coalesced(OPS.start_coalesced(tensors, *args), tensors, *args)
        places.append([x.data_ptr() for x in gathered])
        right.append(all(map(torch.equal, gathered, want)))
        OPS.release_coalesced(gathered, 0, *own)
    found = {"same memory": places[0] == places[1], "apart": len(set(places[0])) == 2, "right": right}
    found["again"] = attempt(lambda: OPS.release_coalesced(gathered, 0, *own))["error"]
    gathered = OPS.finish_coalesced(OPS.start_coalesced(tensors, *args), tensors, *args)
    kept = gathered.pop()
    del gathered
    found["one is kept"] = attempt(lambda: OPS.start_coalesced(tensors, *args))["error"]
    del kept
    gathered = OPS.finish_coalesced(OPS.start_coalesced(tensors, *args), tensors, *args)  # all have left it
    found["abandoned"] = all(map(torch.equal, gathered, want))
    OPS.release_coalesced(gathered, 0, *own)
    with_empty = [*tensors, data(0, 4, seed=1)]
    more = arguments(name, "all_gather", with_empty, zero_copy=True)
    copied = OPS.finish_coalesced(OPS.start_coalesced(with_empty, *more), with_empty, *more)
    OPS.release_coalesced(copied, 0, *more[5:])
    found["copies"] = torch.equal(copied[0], want[0]) and copied[0].data_ptr() not in places[0]
    found["reduced"] = attempt(lambda: OPS.start_coalesced(tensors, *arguments(name, "all_reduce", tensors, zero_copy=True)))[
        "error"
    ]
    return found


def handles(rank: int, world: int) -> list[str]:
    """Lists of tensors in the functions for eager code."""
    name, bad = fresh(world), []
    shards = [
        torch.arange(3 * n).view(n, 3).to(dtype) + rank for n, dtype in ((2, torch.int64), (1, torch.float32), (4, torch.bool))
    ]
    handle = ub_overlap.all_gather(shards, name, async_op=True)
    terms = [data(2 * world, 4, seed=rank), data(world, seed=9 + rank).bfloat16()]
    scattered = ub_overlap.reduce_scatter(terms, name, out_dtype=torch.float32, reduce_op="avg")
    reduced = ub_overlap.all_reduce(terms, name)
    for x, got in zip(shards, handle.wait(), strict=True):
        want = ub_overlap.all_gather(x, name)
        bad += [] if got.dtype == x.dtype and torch.equal(got, want) else [f"all_gather {x.dtype}"]
    for x, got, total in zip(terms, scattered, reduced, strict=True):
        want = ub_overlap.reduce_scatter(x, name, out_dtype=torch.float32, reduce_op="avg")
        bad += [] if got.dtype == torch.float32 and torch.equal(got, want) else [f"reduce_scatter {x.dtype}"]
        bad += (
            [] if total.dtype == x.dtype and torch.equal(total, ub_overlap.all_reduce(x, name)) else [f"all_reduce {x.dtype}"]
        )
    return bad if handle.wait() is handle.wait() else [*bad, "a second wait"]


def misuse(rank: int, world: int) -> list[dict[str, Any]]:
    """Return the errors of wrong calls, then that of a coalesced collective afterwards."""
    name = fresh(world)
    a, b = torch.ones(4, 2), torch.ones(2, 2)
    both = arguments(name, "all_gather", [a, b])
    ub_overlap.all_gather(a, name)
    token = OPS.start_coalesced([a, b], *both)
    found = [
        attempt(lambda: OPS.finish_coalesced(token, [b, a], *both)),
        attempt(lambda: OPS.finish_coalesced(token, [a], *arguments(name, "all_gather", [a]))),
        attempt(lambda: OPS.finish_collective(token, a, "all_gather", "sum", a.dtype, 0, False, "bulk", name, "/coalesced.0")),
    ]
    OPS.finish_coalesced(token, [a, b], *both)
    found += [
        attempt(lambda: OPS.start_coalesced([a, b], *arguments(name, "all_gather", [a]))),
        attempt(lambda: OPS.start_coalesced([a, torch.ones(3, 2)], *arguments(name, "reduce_scatter", [a, b]))),
        attempt(lambda: ub_overlap.all_gather([], name)),
        attempt(lambda: ub_overlap.all_reduce([a, a.long()], name)),
        attempt(lambda: OPS.finish_coalesced(OPS.start_coalesced([a, b], *both), [a, b], *both)),
    ]
    return found


def finish_empty(name: str, collective: str, device: torch.device | str = "cpu") -> list[tuple[int, ...]]:
    """Run collectives of empty tensors only, coalesced and single. Return the sizes of their results."""
    tensors = [torch.empty(0, 3, device=device), torch.empty(4, 0, device=device)]
    args = arguments(name, collective, tensors)
    results = OPS.finish_coalesced(OPS.start_coalesced(tensors, *args), tensors, *args)
    single = (tensors[0], collective, "sum", torch.float32, 1, False, "bulk", name, "/empty")
    token = OPS.start_collective(*single)
    return [tuple(x.shape) for x in (*results, OPS.finish_collective(token, *single))]


def empty_tensors(rank: int, world: int) -> list[list[tuple[int, ...]]]:
    """The slots of a new group have no memory yet, and empty tensors get none. Return the sizes by collective."""
    return [finish_empty(fresh(world), collective) for collective in COLLECTIVES]


def other_sizes(rank: int, world: int) -> dict[str, Any]:
    """The ranks put as many elements into the coalesced collective, but divide them in other ways."""
    name = fresh(world)
    rows = (4, 2) if rank else (2, 4)
    tensors = [torch.ones(n, 2) for n in rows]
    ub_overlap.all_gather(torch.ones(2), name)
    args = arguments(name, "all_gather", tensors)
    return attempt(lambda: OPS.finish_coalesced(OPS.start_coalesced(tensors, *args), tensors, *args))


def fakes(rank: int, world: int) -> list[str]:
    """Compare sizes and dtypes of the fakes with those of the ops."""
    name, bad = fresh(world), []
    tensors = [data(2 * world, 3, seed=1), data(world, seed=2).bfloat16()]
    for collective in COLLECTIVES:
        args = arguments(name, collective, tensors)
        real = OPS.finish_coalesced(OPS.start_coalesced(tensors, *args), tensors, *args)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            inputs = [mode.from_tensor(x) for x in tensors]
            fake = OPS.finish_coalesced(OPS.start_coalesced(inputs, *args), inputs, *args)
        bad += [collective for x, y in zip(real, fake, strict=True) if (x.shape, x.dtype) != (y.shape, y.dtype)]
    assert {"start_coalesced", "finish_coalesced"} <= DEFINITIONS.keys()
    return bad

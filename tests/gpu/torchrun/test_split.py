"""Split collectives: random orders with calls of the group between, delays of single ranks, and all their ops in one graph.

Results are compared bit by bit with the bulk op, whose schedule is the same.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.gpu.cases import BF16, F32, Maker
from tests.gpu.lockstep import Lockstep
from ub_overlap.runtime.session import session

OPS = torch.ops.ub_overlap
KINDS = ("all_gather", "reduce_scatter", "all_reduce")


def arguments(
    collective: str, out_dtype: torch.dtype, slot: int, group: str, name: str, zero_copy: bool = False
) -> tuple[Any, ...]:
    return collective, "sum", out_dtype, slot, zero_copy, "bulk", group, f"{name}.{collective}.{slot}"


def release(gathered: torch.Tensor, slot: int, group: str, name: str) -> None:
    OPS.release_collective(gathered, slot, "bulk", group, f"{name}.all_gather.{slot}")


def bulk(x: torch.Tensor, collective: str, out_dtype: torch.dtype, group: str) -> torch.Tensor:
    return OPS.bulk(x, [], [], collective, "sum", out_dtype, "bulk", group, f"split.bulk.{collective}")[0]


def random_orders(lockstep: Lockstep, group: str, steps: int) -> str:
    """Start, finish and release in a random order, the same on all ranks. Ranks are late on their own.

    The result of a zero-copy gather is copied by its first and by its last reader, with late kernels in between.
    """
    make, order, mine = Maker(lockstep.device, lockstep.ranks), lockstep.shared_random(11), lockstep.own_random(11)
    weight = make.randn(256, 512, dtype=BF16, scale=0.1)
    opened: dict[int, tuple[Any, ...]] = {}
    held: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    results: list[tuple[torch.Tensor, torch.Tensor, str]] = []

    def end(slot: int) -> None:
        if slot in held:
            out, x = held.pop(slot)
            results.append((out.clone(), x, "all_gather"))
            release(out, slot, group, "split")
            return
        token, x, collective, dtype, zero_copy = opened.pop(slot)
        out = OPS.finish_collective(token, x, *arguments(collective, dtype, slot, group, "split", zero_copy))
        results.append((out.clone() if zero_copy else out, x, collective))
        if zero_copy:
            held[slot] = out, x

    for _ in range(steps):
        slot, what = order.randrange(4), order.randrange(5)
        collective, rows = order.choice(KINDS), order.choice((1, 3, 64, 257)) * lockstep.ranks
        dtype = BF16 if collective == "all_gather" else order.choice((BF16, F32))
        if mine.random() < 0.2:
            lockstep.sleep_on_device(mine.random() * 0.001)
        if what == 0:
            shard = make.randn(1, 64, 256, dtype=BF16)
            args = ([weight], [False], [False], 1, False, False, [], [], "pipelined", group, "split.between")
            OPS.all_gather_matmul(shard, *args)
        elif what == 1 and (opened or held):
            end(order.choice(sorted({**opened, **held})))
        else:
            while slot in opened or slot in held:
                end(slot)
            x, zero_copy = make.randn(rows, 256, dtype=BF16), collective == "all_gather" and order.random() < 0.6
            token = OPS.start_collective(x, *arguments(collective, dtype, slot, group, "split", zero_copy))
            opened[slot] = (token, x, collective, dtype, zero_copy)
    for slot in sorted({**opened, **held}):
        while slot in opened or slot in held:
            end(slot)
    lockstep.sync()
    session.check(group)
    wrong = [i for i, (out, x, collective) in enumerate(results) if not torch.equal(out, bulk(x, collective, out.dtype, group))]
    lockstep.sync()
    if wrong:
        raise AssertionError(f"{len(wrong)} of {len(results)} results are wrong, the first {wrong[:5]}")
    return f"{len(results)} split collectives, bitwise"


def replays(lockstep: Lockstep, group: str, turns: int, zero_copy: bool) -> str:
    """Replay a graph with two open collectives and a call between, and alternate with the same eagerly."""
    if not lockstep.cuda:
        pytest.skip("the CPU has no graphs")
    make = Maker(lockstep.device, lockstep.ranks)
    static, weight = make.randn(64 * lockstep.ranks, 256, dtype=BF16), make.randn(256, 512, dtype=BF16, scale=0.1)
    inputs = [make.randn(64 * lockstep.ranks, 256, dtype=BF16) for _ in range(3)]
    gather = arguments("all_gather", BF16, 0, group, "graph", zero_copy)
    scatter = arguments("reduce_scatter", BF16, 1, group, "graph")

    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = OPS.start_collective(x, *gather)
        second = OPS.start_collective(x, *scatter)
        args = ([weight], [False], [False], 1, False, False, [], [], "pipelined", group, "graph.between")
        OPS.all_gather_matmul(x.unsqueeze(0), *args)
        gathered = OPS.finish_collective(first, x, *gather)
        scattered = OPS.finish_collective(second, x, *scatter)
        if zero_copy:
            read = gathered.clone()
            release(gathered, 0, group, "graph")
            gathered = read
        return gathered, scattered

    expected = [(bulk(x, "all_gather", BF16, group), bulk(x, "reduce_scatter", BF16, group)) for x in inputs]
    step(static)  # allocates the slots
    lockstep.sync()
    lockstep.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        captured = step(static)
    lockstep.sync()
    lockstep.barrier()
    wrong = []
    for turn in range(turns):
        which = turn % 3
        if turn % 4 == 3:
            got = step(inputs[which])
        else:
            static.copy_(inputs[which])
            graph.replay()
            got = captured
        lockstep.sync()
        wrong += [turn] * (not all(torch.equal(a, b) for a, b in zip(got, expected[which], strict=True)))
    session.check(group)
    if wrong:
        raise AssertionError(f"{len(wrong)} of {turns} turns are wrong, the first {wrong[:5]}")
    del captured, graph
    return f"{turns} turns, bitwise"


@pytest.mark.parametrize("steps", [40, 300])
def test_random_orders(lockstep: Lockstep, group: str, steps: int) -> None:
    lockstep.note(random_orders(lockstep, group, steps))


@pytest.mark.parametrize("zero_copy", [False, True])
def test_replays(lockstep: Lockstep, group: str, zero_copy: bool) -> None:
    lockstep.note(replays(lockstep, group, 40, zero_copy))

"""Coalesced collectives of random tensors, with calls of the group between, and in graphs: equal in bits to single ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu.cases import BF16, F32, Maker
from tests.gpu.lockstep import Lockstep
from tests.runtime.rank_coalesced import finish_empty
from ub_overlap.runtime.session import session

OPS = torch.ops.ub_overlap
KINDS = ("all_gather", "reduce_scatter", "all_reduce")


def arguments(collective: str, dtypes: list[torch.dtype], slot: int, group: str, zero_copy: bool = False) -> tuple[Any, ...]:
    return collective, "sum", dtypes, slot, zero_copy, "bulk", group, f"coalesced.{collective}.{slot}"


def finish(token: Tensor, tensors: list[Tensor], arguments: tuple[Any, ...]) -> list[Tensor]:
    """Return the results, of a zero-copy gather copies, which is released."""
    results = OPS.finish_coalesced(token, tensors, *arguments)
    if not arguments[4]:
        return results
    copies = [x.clone() for x in results]
    OPS.release_coalesced(results, arguments[3], *arguments[5:])
    return copies


def alone(tensors: list[Tensor], collective: str, dtypes: list[torch.dtype], group: str) -> list[Tensor]:
    return [
        OPS.bulk(x, [], [], collective, "sum", dtype, "bulk", group, f"coalesced.alone.{collective}")[0]
        for x, dtype in zip(tensors, dtypes, strict=True)
    ]


def random_coalesced(lockstep: Lockstep, group: str, steps: int) -> str:
    """Start and finish collectives of one to twenty tensors in four slots in a random order. Ranks are late on their own."""
    make, order, mine = Maker(lockstep.device, lockstep.ranks), lockstep.shared_random(12), lockstep.own_random(12)
    opened: dict[int, tuple[Any, ...]] = {}
    results: list[tuple[list[Tensor], list[Tensor], str, list[torch.dtype]]] = []

    def end(slot: int) -> None:
        token, tensors, collective, dtypes, zero_copy = opened.pop(slot)
        outs = finish(token, tensors, arguments(collective, dtypes, slot, group, zero_copy))
        results.append((outs, tensors, collective, dtypes))

    for _ in range(steps):
        slot, collective = order.randrange(4), order.choice(KINDS)
        if mine.random() < 0.2:
            lockstep.sleep_on_device(mine.random() * 0.001)
        if slot in opened:
            end(slot)
            continue
        rows = [order.choice((0, 1, 3, 64, 257)) * lockstep.ranks for _ in range(order.choice((1, 2, 3, 20)))]
        tensors = [make.randn(count, 256, dtype=BF16) for count in rows]
        dtypes = [BF16 if collective == "all_gather" else order.choice((BF16, F32)) for _ in rows]
        zero_copy = collective == "all_gather" and order.random() < 0.6
        token = OPS.start_coalesced(tensors, *arguments(collective, dtypes, slot, group, zero_copy))
        opened[slot] = (token, tensors, collective, dtypes, zero_copy)
    for slot in sorted(opened):
        end(slot)
    lockstep.sync()
    session.check(group)
    wrong = [
        i
        for i, (outs, tensors, collective, dtypes) in enumerate(results)
        if not all(map(torch.equal, outs, alone(tensors, collective, dtypes, group)))
    ]
    lockstep.sync()
    if wrong:
        raise AssertionError(f"{len(wrong)} of {len(results)} coalesced collectives are wrong, the first {wrong[:5]}")
    return f"{len(results)} coalesced collectives, bitwise"


def replays(lockstep: Lockstep, group: str, turns: int, zero_copy: bool) -> str:
    """Replay a graph with a gather and a reduction of three tensors each, and alternate with the same eagerly."""
    if not lockstep.cuda:
        pytest.skip("the CPU has no graphs")
    make, dtypes = Maker(lockstep.device, lockstep.ranks), [BF16] * 3
    shapes = [(64 * lockstep.ranks, 256), (lockstep.ranks, 128), (16 * lockstep.ranks, 512)]
    static = [make.randn(*shape, dtype=BF16) for shape in shapes]
    inputs = [[make.randn(*shape, dtype=BF16) for shape in shapes] for _ in range(3)]
    gather, scatter = arguments("all_gather", dtypes, 0, group, zero_copy), arguments("reduce_scatter", dtypes, 1, group)

    def step(tensors: list[Tensor]) -> list[Tensor]:
        first, second = OPS.start_coalesced(tensors, *gather), OPS.start_coalesced(tensors, *scatter)
        return [*finish(first, tensors, gather), *finish(second, tensors, scatter)]

    expected = [
        [*alone(tensors, "all_gather", dtypes, group), *alone(tensors, "reduce_scatter", dtypes, group)] for tensors in inputs
    ]
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
        which, got = turn % 3, captured
        if turn % 4 == 3:
            got = step(inputs[which])
        else:
            for to, x in zip(static, inputs[which], strict=True):
                to.copy_(x)
            graph.replay()
        lockstep.sync()
        wrong += [turn] * (not all(map(torch.equal, got, expected[which])))
    session.check(group)
    if wrong:
        raise AssertionError(f"{len(wrong)} of {turns} turns are wrong, the first {wrong[:5]}")
    del captured, graph
    return f"{turns} turns, bitwise"


@pytest.mark.parametrize("steps", [40, 200])
def test_random_coalesced(lockstep: Lockstep, group: str, steps: int) -> None:
    lockstep.note(random_coalesced(lockstep, group, steps))


def test_empty_tensors_in_slots_without_memory(lockstep: Lockstep) -> None:
    rows = {"all_gather": 4 * lockstep.ranks, "reduce_scatter": 4 // lockstep.ranks, "all_reduce": 4}
    for collective, count in rows.items():
        if 4 % lockstep.ranks and collective == "reduce_scatter":
            continue
        found = finish_empty(lockstep.new_group(), collective, lockstep.device)
        assert found == [(0, 3), (count, 0), (0, 3)], f"{collective}: {found}"


@pytest.mark.parametrize("zero_copy", [False, True])
def test_replays(lockstep: Lockstep, group: str, zero_copy: bool) -> None:
    lockstep.note(replays(lockstep, group, 40, zero_copy))

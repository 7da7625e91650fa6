"""Windows of rings: how they are recognized, their slots, and places that no rank's clock changes."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.fx import Node

from tests.compiler.dags import Dag, aten, c10d
from tests.compiler.rank_compile import world_name
from tests.harness.ranks import RankPool
from ub_overlap.compiler.match.collectives import Op, find_collectives
from ub_overlap.compiler.match.window import WindowFinder
from ub_overlap.compiler.windows.placement import Item, Limits, Transfer, place
from ub_overlap.compiler.windows.ring_slots import EXCHANGES, GATHERS, fix_slots


def transfer(position: int, latest: int, group: str = "g", **changes: Any) -> Transfer:
    made = Transfer(group, position, latest, position, False, 1.0, 10.0, 1.0, 12.0, landing_bytes=64, is_required=True)
    return replace(made, **changes)


def test_slots_follow_the_order() -> None:
    """Number n takes slot n modulo a constant, and ends before the start that takes its slot again."""
    transfers = [transfer(p, 100) for p in (1, 3, 5, 7, 9)] + [transfer(4, 100, "other"), transfer(2, 100)]
    fix_slots(transfers, {k: Op.ALL_GATHER for k in range(6)})
    assert [t.slot for t in transfers] == [0, 1, 0, 1, 0, 0, None]
    assert [t.latest for t in transfers] == [5, 7, 9, 100, 100, 100, 100] and GATHERS == 2
    exchanges = [transfer(p, 100) for p in range(6)]
    fix_slots(exchanges, dict.fromkeys(range(6), Op.ALL_TO_ALL))
    assert [t.slot for t in exchanges] == [0, 1, 2, 3, 0, 1] and exchanges[0].latest == EXCHANGES


@pytest.mark.parametrize("us", [0.0, 1000.0])
def test_places_do_not_depend_on_the_clock(us: float) -> None:
    """Starts and slots are the same for a rank that computes nothing in between. Others of the group leave the slots alone."""
    items = [Item(us)] * 8
    transfers = [transfer(1, 4), transfer(3, 6), transfer(0, 7)]
    fix_slots(transfers, {0: Op.ALL_TO_ALL, 1: Op.ALL_TO_ALL})
    placed = [p for p in place(items, transfers, Limits(1 << 20, 8)) if p is not None]
    assert [(p.start, p.slot) for p in placed] == [(1, 0), (3, 1), (0, 2)]
    assert [p.finish for p in placed[:2]] == [4, 6]


def of_gather(rank: int, world: int, pieces: list[int] | None, source: str) -> bool:
    """Return whether graphs may differ by rank where some pieces of a gathered tensor are read, or all joined (None)."""
    d = Dag(world, world_name(), torch.float32)
    x = d.input("x", 8, 4)
    gathered = d.gather(d.call(aten.relu.default, x))
    if pieces is None:
        parts = d.call(aten.split.Tensor, gathered, 8)
        value = d.call(aten.cat.default, [d.call(operator.getitem, parts, i) for i in range(world)], 1)
        read = [d.call(aten.sigmoid.default, value)]
    elif source == "slice":
        read = [d.call(aten.sigmoid.default, d.call(aten.slice.Tensor, gathered, 0, 8 * i, 8 * i + 8)) for i in pieces]
    else:
        parts = d.call(aten.split.Tensor, gathered, 8)
        read = [d.call(aten.sigmoid.default, d.call(operator.getitem, parts, i)) for i in pieces]
    graph = d.output(x, *read)
    return WindowFinder(graph).find(find_collectives(graph)[0]).may_differ_by_rank


def test_gathers_of_rings(pool2: RankPool) -> None:
    """A ring reads some shards, or none; look-alikes read all of them, or join them along another dim."""
    for pieces, source, expected in [([1], "split", True), ([0], "slice", True), ([], "slice", True),
                                     ([0, 1], "split", False), ([0, 1], "slice", False), (None, "split", False)]:  # fmt: skip
        assert pool2.run(of_gather, pieces, source, timeout=30) == [expected] * 2, (pieces, source)


def of_exchange(rank: int, world: int, outputs: list[int], inputs: list[int]) -> bool:
    d = Dag(world, world_name(), torch.float32)
    x: Node = d.input("x", sum(inputs), 4)
    made = d.call(c10d.all_to_all_single.default, d.call(aten.relu.default, x), outputs, inputs, world_name())
    graph = d.output(d.call(aten.sigmoid.default, d.call(c10d.wait_tensor.default, made)))
    return WindowFinder(graph).find(find_collectives(graph)[0]).may_differ_by_rank


def test_permutes(pool2: RankPool) -> None:
    """One rank gets all rows; look-alikes: even parts, uneven ones, and a rank that receives another number."""
    for outputs, inputs, expected in [([0, 8], [0, 8], True), ([8, 0], [0, 8], True), ([4, 4], [4, 4], False),
                                      ([6, 2], [6, 2], False), ([4, 0], [0, 8], False)]:  # fmt: skip
        assert pool2.run(of_exchange, outputs, inputs, timeout=30) == [expected] * 2, (outputs, inputs)

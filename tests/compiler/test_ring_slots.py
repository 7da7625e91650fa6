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
from ub_overlap.compiler.cost import load
from ub_overlap.compiler.cost.policy import Policy
from ub_overlap.compiler.cost.predict import collective_us
from ub_overlap.compiler.cost.site_shape import SiteShape
from ub_overlap.compiler.cost.site_sizes import shape_of_site
from ub_overlap.compiler.cost.split_time import split_times
from ub_overlap.compiler.cost.traffic import bytes_sent
from ub_overlap.compiler.match import Candidate, Split
from ub_overlap.compiler.match.all_to_all import finishes_together, why_not_split
from ub_overlap.compiler.match.collectives import Op, find_collectives
from ub_overlap.compiler.match.window import WindowFinder
from ub_overlap.compiler.options import Options
from ub_overlap.compiler.select.alternatives import Alternatives
from ub_overlap.compiler.select.profitability import SiteCosts
from ub_overlap.compiler.windows.placement import Item, Limits, Transfer, place
from ub_overlap.compiler.windows.ring_slots import EXCHANGES, GATHERS, fix_slots
from ub_overlap.compiler.windows.split_candidates import find_splits
from ub_overlap.compiler.windows.widen import widen_windows


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


def test_inputs_that_are_ready_early() -> None:
    """What is ready early starts at its traced place: its slot stays free for those before it.

    In the backward of a ring the keys and values of all layers are inputs of the graph.
    """
    transfers = [replace(transfer(10 * n, 10 * n + 9), earliest=0) for n in range(6)]
    fix_slots(transfers, dict.fromkeys(range(6), Op.ALL_TO_ALL))
    placed = place([Item(1.0)] * 60, transfers, Limits(1 << 20, 8))
    assert [(p.start, p.finish, p.slot) for p in placed if p] == [(10 * n, 10 * n + 9, n % 4) for n in range(6)]


def test_results_that_are_read_late() -> None:
    """A slot is left in front of the traced place of the one that takes it again."""
    transfers = [transfer(10 * n, 59) for n in range(6)]
    fix_slots(transfers, dict.fromkeys(range(6), Op.ALL_TO_ALL))
    placed = place([Item(1.0)] * 60, transfers, Limits(1 << 20, 8))
    assert [(p.start, p.finish) for p in placed if p] == [(0, 40), (10, 50), (20, 59), (30, 59), (40, 59), (50, 59)]


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
        assert pool2.run(of_gather, pieces, source) == [expected] * 2, (pieces, source)


def large_step(rank: int, world: int, rows: int) -> tuple[str, bool]:
    """Return why a step of `rows` MiB is not split, and whether its finish waits for those of other ranks."""
    d = Dag(world, world_name())
    splits = [rows if peer != rank else 0 for peer in range(world)]
    x = d.input("x", rows, 1 << 19)
    made = d.call(c10d.all_to_all_single.default, d.call(aten.relu.default, x), splits, splits, world_name())
    graph = d.output(d.call(aten.sigmoid.default, d.call(c10d.wait_tensor.default, made)))
    (c,) = find_collectives(graph)
    miss = why_not_split(c)
    return miss.reason.value if miss else "", finishes_together(c)


def test_steps_of_several_rounds_are_not_split(pool2: RankPool) -> None:
    """Ranks may have other orders of finishes, and the finish of several rounds waits for the peers'."""
    assert pool2.run(large_step, 1024) == [("", False)] * 2
    assert pool2.run(large_step, 1025) == [("memory", True)] * 2


def moved_around_steps(rank: int, world: int, reads: str) -> list[str]:
    """Return the order of two steps of a ring, an independent matmul in front, and what reads the second step."""
    d = Dag(world, world_name())
    x, w, t = d.input("x", 8192, 4096), d.input("w", 4096, 4096), d.input("t", 8192, 4096)
    rows = [8192 if peer != rank else 0 for peer in range(world)]

    def step(sent: Node) -> Node:
        made = d.call(c10d.all_to_all_single.default, d.call(aten.relu.default, sent), rows, rows, world_name())
        return d.call(c10d.wait_tensor.default, made)

    independent = d.mm(x, w)
    second = step(step(t))
    if reads == "attention":
        q, k = (d.call(aten.view.default, n, [1, 32, -1, 128]) for n in (x, second))
        last = d.call(aten._scaled_dot_product_flash_attention.default, q, k, k)
    else:
        last = d.mm(d.call(aten.mul.Tensor, second, 2.0), w)
    graph = d.output(last, independent)
    names = {independent: "independent", last: "reader"}
    names |= {c.node: f"step {i}" for i, c in enumerate(find_collectives(graph))}
    widen_windows(graph, Policy.of(Options(profile="h200", min_bytes=0)), None)
    graph.lint()
    return [names[n] for n in graph.nodes if n in names]


def test_only_the_last_step_is_widened(pool2: RankPool) -> None:
    """Other ranks may attend in the others, or skip them: there the order stays."""
    moved, kept = (pool2.run(moved_around_steps, reads) for reads in ("matmul", "attention"))
    assert moved == [["step 0", "step 1", "independent", "reader"]] * 2
    assert kept == [["independent", "step 0", "step 1", "reader"]] * 2


def of_exchange(rank: int, world: int, outputs: list[int], inputs: list[int]) -> bool:
    d = Dag(world, world_name(), torch.float32)
    x: Node = d.input("x", sum(inputs), 4)
    made = d.call(c10d.all_to_all_single.default, d.call(aten.relu.default, x), outputs, inputs, world_name())
    graph = d.output(d.call(aten.sigmoid.default, d.call(c10d.wait_tensor.default, made)))
    return WindowFinder(graph).find(find_collectives(graph)[0]).may_differ_by_rank


def sizes_of_exchange(rank: int, world: int, is_ring: bool) -> tuple[float, int | None, float, int]:
    """Return the bytes that the cost model and the report count, the time of the transfer, and the landing memory."""
    d = Dag(world, world_name())
    rows = [0] * world if is_ring else [1024 // world] * world
    x = d.input("x", 1024, 4096)
    sent, received = list(rows), list(rows)
    if is_ring:
        sent[(rank + 1) % world] = received[(rank - 1) % world] = 1024
    made = d.call(c10d.all_to_all_single.default, d.call(aten.relu.default, x), received, sent, world_name())
    graph = d.output(d.call(aten.sigmoid.default, d.call(c10d.wait_tensor.default, made)))
    (c,) = find_collectives(graph)
    shape = shape_of_site(Split(c), {})
    assert shape is not None
    costs = SiteCosts.of(graph, Policy.of(Options(profile="h200", min_bytes=0)))
    (split,) = find_splits(graph, [Candidate(c, None)], [Alternatives([])], {}, costs, None).values()
    return shape.bytes_sent, bytes_sent(Split(c)), split.times.transfer_us, split.landing_bytes


def test_price_of_a_step(pool2: RankPool) -> None:
    """A step of a ring sends all rows to one rank; an exchange of equal parts keeps one of them.

    Landing memory has an area for each rank, as large as the largest part; that of a step is one area.
    """
    size, load_us = 1024 * 4096 * 2, []
    for is_ring, sent, landing in [(True, size, size), (False, size / 2, size)]:
        results = pool2.run(sizes_of_exchange, is_ring)
        assert len(set(results)) == 1 and results[0][0] == results[0][1] == sent and results[0][3] == landing
        load_us.append(results[0][2])
    assert load_us[0] > 1.3 * load_us[1]


def test_steps_across_hosts() -> None:
    """The last rank of a host sends all its rows to another host, the others none."""
    profile = load("h200")
    even = SiteShape("all_to_all", 16, "bfloat16", (), 1 << 20, 128, hosts=2)
    ring = replace(even, to_one_rank=True)
    assert profile.network is not None
    transfer_us = ring.whole_bytes / (profile.network.gbs * 1e3)
    assert collective_us(ring, profile) > transfer_us > 1.5 * collective_us(even, profile)


def test_large_parts_travel_in_rounds() -> None:
    """Landing memory is at most 1 GiB: of larger parts the first round is hidden."""
    profile = load("h200")
    small = SiteShape("all_to_all", 8, "bfloat16", (), 1 << 19, 1024, to_one_rank=True)  # one area of 1 GiB
    large = replace(small, rows=1 << 21)
    one, four = split_times(small, 0, profile), split_times(large, 0, profile)
    assert four.transfer_us == pytest.approx(one.transfer_us)
    assert four.finish_us > one.finish_us + 3 * one.transfer_us


def test_permutes(pool2: RankPool) -> None:
    """One rank gets all rows; look-alikes: even parts, uneven ones, and a rank that receives another number."""
    for outputs, inputs, expected in [([0, 8], [0, 8], True), ([8, 0], [0, 8], True), ([4, 4], [4, 4], False),
                                      ([6, 2], [6, 2], False), ([4, 0], [0, 8], False)]:  # fmt: skip
        assert pool2.run(of_exchange, outputs, inputs) == [expected] * 2, (outputs, inputs)

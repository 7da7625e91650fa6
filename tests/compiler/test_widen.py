"""Independent nodes that move into the windows of collectives in the middle of a graph."""

from __future__ import annotations

from typing import Any

import pytest
from torch.fx import Graph, Node

from tests.compiler.dags import Dag, aten
from tests.compiler.exchange_dags import ReadDag
from ub_overlap.compiler.cost.policy import Policy
from ub_overlap.compiler.options import Options
from ub_overlap.compiler.select.peak_memory import PeakMemory
from ub_overlap.compiler.windows.widen import widen_windows

WIDTH, ROWS = 4096, 8192


def widen(graph: Graph, **options: Any) -> int:
    moved = widen_windows(graph, Policy.of(Options(profile="h200", min_bytes=0, **options)), None)
    graph.lint()
    return moved


def order_of(graph: Graph, *nodes: Node) -> list[Node]:
    return [n for n in graph.nodes if n in nodes]


class Attention:
    """q, k and v of one input, keys and values gathered, and what reads them."""

    def __init__(self, size: int = ROWS) -> None:
        self.dag = d = Dag(2)
        self.x = d.input("x", size, WIDTH)
        self.w = [d.input(f"w{i}", WIDTH, WIDTH) for i in range(3)]
        self.q = d.mm(self.x, self.w[0])
        self.k = d.mm(self.x, self.w[1])
        self.k_normed = d.call(aten.relu.default, self.k)
        self.gathered_k = d.gather(self.k_normed)
        self.v = d.mm(self.x, self.w[2])
        self.v_normed = d.call(aten.relu.default, self.v)
        self.gathered_v = d.gather(self.v_normed)
        self.scores = self.attend(self.q, self.gathered_k, self.gathered_v)

    def attend(self, q: Node, k: Node, v: Node) -> Node:
        q, k, v = (self.dag.call(aten.view.default, t, [1, 32, -1, 128]) for t in (q, k, v))
        return self.dag.call(aten._scaled_dot_product_flash_attention.default, q, k, v)

    @property
    def starts(self) -> list[Node]:
        return [self.gathered_k.all_input_nodes[0], self.gathered_v.all_input_nodes[0]]


def test_the_q_projection_runs_behind_the_starts() -> None:
    """Both gathers start before the projection that no gather needs, and keep their order."""
    a = Attention()
    graph = a.dag.output(a.scores)
    assert order_of(graph, a.q, *a.starts) == [a.q, *a.starts]
    assert widen(graph) > 0
    assert order_of(graph, a.q, a.k, a.v, *a.starts, a.scores) == [a.k, a.starts[0], a.v, a.starts[1], a.q, a.scores]
    assert widen(graph) == 0  # all is hidden


def test_weight_gradients_run_before_the_first_reader() -> None:
    """A matmul behind the reader that needs nothing of the collective; look-alike: one that needs the result."""
    d = Dag(2)
    gradient, x, w = d.input("gradient", ROWS, WIDTH), d.input("x", ROWS, WIDTH), d.input("w", WIDTH, WIDTH)
    reduced = d.scatter(d.call(aten.relu.default, gradient))
    read = d.call(aten.relu.default, reduced)
    needing = d.mm(read, w)
    independent = d.mm(d.t(x), gradient)
    graph = d.output(needing, independent)
    assert widen(graph) > 0
    assert order_of(graph, read, needing, independent) == [independent, read, needing]


@pytest.mark.parametrize("options", [{"split": "off"}, {"overlap": "force"}, {"overlap": "off"}])
def test_options_that_split_nothing(options: dict[str, Any]) -> None:
    a = Attention()
    assert widen(a.dag.output(a.scores), **options) == 0


def test_a_write_is_not_passed() -> None:
    """Look-alike: the input of the q projection is written between it and the collective."""
    d = Dag(2)
    x, w, other = d.input("x", ROWS, WIDTH), d.input("w", WIDTH, WIDTH), d.input("other", ROWS, WIDTH)
    q = d.mm(x, w)
    d.call(aten.mul_.Tensor, x, 2.0)
    gathered = d.gather(d.call(aten.relu.default, other))
    graph = d.output(d.call(aten.sigmoid.default, gathered), q)
    before = list(graph.nodes)
    assert widen(graph) == 0 and list(graph.nodes) == before


def test_random_numbers_keep_their_order() -> None:
    d = Dag(2)
    x, w = d.input("x", ROWS, WIDTH), d.input("w", WIDTH, WIDTH)
    dropped = d.call(aten.bernoulli.p, x, 0.5)
    product = d.mm(dropped, w)
    gathered = d.gather(d.call(aten.relu.default, x))
    graph = d.output(d.call(aten.sigmoid.default, gathered), product)
    assert widen(graph) > 0
    assert order_of(graph, dropped, gathered, product) == [dropped, product, gathered]


def test_a_matmul_of_the_shards_is_left_to_its_site() -> None:
    """Look-alike: the gathered tensor is multiplied, so that it is pipelined with its matmul."""
    d = Dag(2)
    x, w, other = d.input("x", ROWS, WIDTH), d.input("w", WIDTH, WIDTH), d.input("other", WIDTH, WIDTH)
    independent = d.mm(x, other)
    gathered = d.gather(d.call(aten.relu.default, x))
    assert widen(d.output(d.mm(gathered, w), independent)) == 0


def test_windows_of_earlier_collectives_stay_filled() -> None:
    """The only matmul that hides one gather does not move behind the next one."""
    d = Dag(2)
    x, w, late = d.input("x", ROWS, WIDTH), d.input("w", WIDTH, WIDTH), d.input("late", ROWS, WIDTH)
    first = d.gather(d.call(aten.relu.default, x))
    product = d.mm(x, w)
    read = d.call(aten.sigmoid.default, first)
    second = d.gather(d.call(aten.relu.default, late))
    graph = d.output(d.call(aten.sigmoid.default, second), read, product)
    widen(graph)
    assert order_of(graph, first.all_input_nodes[0], product, read) == [first.all_input_nodes[0], product, read]


def forbid_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit peak memory to that of the graph as traced."""
    monkeypatch.setattr("ub_overlap.compiler.select.peak_memory.MORE_BYTES", 0)
    monkeypatch.setattr("ub_overlap.compiler.select.peak_memory.MORE_SHARE", 0.0)


@pytest.mark.parametrize("is_limited", [False, True])
def test_peak_memory_limits_moves(monkeypatch: pytest.MonkeyPatch, is_limited: bool) -> None:
    """Nothing moves where the operands of delayed nodes would raise the peak too far."""
    if is_limited:
        forbid_growth(monkeypatch)
    d = Dag(2)
    x, v, w = d.input("x", ROWS, WIDTH), d.input("v", WIDTH, WIDTH), d.input("w", WIDTH, 16)
    hidden = d.mm(d.mm(x, v), v)
    small = d.mm(hidden, w)
    sent = d.mm(d.mm(x, v), v)
    gathered = d.gather(sent)
    graph = d.output(d.call(aten.sigmoid.default, gathered), small)
    before = list(graph.nodes)
    moved = widen(graph)
    assert (moved == 0 and list(graph.nodes) == before) if is_limited else moved > 0


@pytest.mark.parametrize("large_first", [False, True])
@pytest.mark.parametrize("is_limited", [False, True])
def test_windows_within_the_memory_limit_are_widened(
    monkeypatch: pytest.MonkeyPatch, is_limited: bool, large_first: bool
) -> None:
    """Of two gathers one has a product in front of it that reads parameters, the other one that reads a large tensor. That
    tensor would live as long as the gather, beyond the limit, so this window alone stays as it is."""
    if is_limited:
        forbid_growth(monkeypatch)
    d = Dag(2)
    x, large, v, w = (
        d.input(f"primals_{i}", *shape)
        for i, shape in enumerate([(ROWS, WIDTH), (2 * ROWS, WIDTH), (WIDTH, WIDTH), (WIDTH, 16)])
    )

    def add_large() -> list[Node]:
        product = d.mm(d.mm(d.mm(large, v), v), w)
        gathered = d.gather(d.mm(d.mm(large, v), v))
        return [product, gathered.all_input_nodes[0], d.call(aten.amax.default, gathered, [1])]

    def add_harmless() -> list[Node]:
        product = d.mm(x, v)
        gathered = d.gather(d.call(aten.relu.default, x))
        return [product, gathered.all_input_nodes[0], d.call(aten.amax.default, gathered, [1])]

    if large_first:
        stays, moves = add_large(), add_harmless()
    else:
        moves, stays = add_harmless(), add_large()
    graph = d.output(stays[0], stays[2], moves[0], moves[2])
    peak = PeakMemory.of(graph, {}).peak
    assert widen(graph) > 0
    product, start, read = moves
    assert order_of(graph, *moves) == [start, product, read]
    product, start, read = stays
    assert order_of(graph, *stays) == ([product, start, read] if is_limited else [start, product, read])
    assert (PeakMemory.of(graph, {}).peak <= peak) == is_limited


@pytest.mark.parametrize("is_read", [True, False])
def test_short_kernels_are_not_advanced_where_the_host_reads(is_read: bool) -> None:
    """Behind an exchange whose numbers the host has read, the host issues what is in the window first. So a matmul moves there
    past short kernels, which fill other windows."""
    d = ReadDag(WIDTH)
    rows, w, x, indices = d.input("rows", ROWS, WIDTH), d.input("w", WIDTH, WIDTH), d.input("x", 16, 64), d.input("i", 64, 64)
    count = d.number(0, d.counts(0, x)) if is_read else ROWS // 2
    landed = d.exchange("dispatch", rows, [count] * 2)
    first = d.relu(landed)
    short = [indices]
    for _ in range(8):
        short.append(d.call(aten.cumsum.default, short[-1], 0))
    other = d.mm(rows, w)
    graph = d.output(first, *short[1:], other)
    widen(graph)
    order = list(graph.nodes)
    assert order.index(other) < order.index(first)
    assert (order.index(short[1]) < order.index(first)) == (not is_read)

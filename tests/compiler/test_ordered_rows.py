"""Rows of an all_to_all that are read in another order: the finish returns them so, where that is one copy less."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

import ub_overlap
from benchmarks.expert_parallel.model import ROUTINGS, SIZES, ExpertLayer, make_routes
from tests.compiler.dags import Dag, aten
from tests.harness.ranks import RankPool
from tests.harness.tiers import INNER, full_but
from ub_overlap.compiler.rewrite import rewrite_graph
from ub_overlap.compiler.rewrite.ordered_rows import read_in_order
from ub_overlap.runtime import ops

ROWS, WIDTH = 8, 16


class RowsDag(Dag):
    """Builder of graphs with one exchange that is split already."""

    def numbers(self, name: str, *shape: int, dtype: torch.dtype = torch.int64) -> Node:
        node = self.graph.placeholder(name)
        with self.mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype)
        return node

    def finish(self, x: Node) -> Node:
        half = [ROWS // 2, ROWS // 2]
        arguments = (x, half, half, 0, False, "bulk", self.group, "/site")
        own = torch.ops.ub_overlap
        return self.call(own.finish_all_to_all.default, self.call(own.start_all_to_all.default, *arguments), *arguments)

    def index(self, rows: Node, order: Node) -> Node:
        return self.call(aten.index.Tensor, rows, [order])

    def graph_of(self, rows: Node, *others: Node) -> Graph:
        """Return the graph with a product of the rows that are read."""
        return self.output(self.mm(rows, self.call(aten.permute.default, rows, [1, 0])), *others)


def targets(graph: Graph) -> list[str]:
    return [n.target.__name__.split(".")[0] for n in graph.nodes if n.op == "call_function"]


@pytest.fixture
def dag() -> RowsDag:
    ops.load()
    return RowsDag()


def test_an_order(dag: RowsDag) -> None:
    order = dag.numbers("order", ROWS)
    received = dag.finish(dag.input("x", ROWS, WIDTH))
    graph = dag.graph_of(dag.index(received, order))
    assert read_in_order(graph) == 1
    graph.lint()
    assert targets(graph) == ["start_all_to_all", "finish_all_to_all", "permute", "mm"]
    assert received.args[-1] is order and len(received.args) == len(received.target._schema.arguments)


def test_an_order_of_ordered_rows(dag: RowsDag) -> None:
    first, second = (dag.numbers(name, ROWS) for name in ("first", "second"))
    received = dag.finish(dag.input("x", ROWS, WIDTH))
    graph = dag.graph_of(dag.index(dag.index(received, first), second))
    assert read_in_order(graph) == 1 and read_in_order(graph) == 0
    assert received.args[-1] is first and targets(graph)[2] == "index"


Look = Callable[[RowsDag, Node, Callable[..., Node]], tuple[Node, ...]]
"""(graph, received rows, a maker of numbers) -> what is multiplied, and what else the graph returns."""


def columns(d: RowsDag, rows: Node, numbers: Callable[..., Node]) -> tuple[Node, ...]:
    return (d.call(aten.index.Tensor, rows, [None, numbers(WIDTH)]),)


def elements(d: RowsDag, rows: Node, numbers: Callable[..., Node]) -> tuple[Node, ...]:
    order = numbers(ROWS)
    return (d.call(aten.unsqueeze.default, d.call(aten.index.Tensor, rows, [order, order]), 1),)


def matrix_of_numbers(d: RowsDag, rows: Node, numbers: Callable[..., Node]) -> tuple[Node, ...]:
    return (d.call(aten.view.default, d.index(rows, numbers(ROWS, 1)), [ROWS, WIDTH]),)


def read_twice(d: RowsDag, rows: Node, numbers: Callable[..., Node]) -> tuple[Node, ...]:
    return d.index(rows, numbers(ROWS)), d.call(aten.relu.default, rows)


def read_in_two_orders(d: RowsDag, rows: Node, numbers: Callable[..., Node]) -> tuple[Node, ...]:
    return d.index(rows, numbers(ROWS)), d.index(rows, numbers(ROWS))


def returned_too(d: RowsDag, rows: Node, numbers: Callable[..., Node]) -> tuple[Node, ...]:
    return d.index(rows, numbers(ROWS)), rows


def computed_behind(d: RowsDag, rows: Node, numbers: Callable[..., Node]) -> tuple[Node, ...]:
    """What the exchange sends may be written before the order is there."""
    return (d.index(rows, d.call(aten.add.Tensor, numbers(ROWS), 1)),)


def written_order(d: RowsDag, rows: Node, numbers: Callable[..., Node]) -> tuple[Node, ...]:
    return (d.index(rows, d.call(aten.add_.Tensor, numbers(ROWS), 1)),)


LOOKALIKES: dict[str, Look] = {
    "fewer rows": lambda d, rows, numbers: (d.index(rows, numbers(ROWS // 2)),),
    "more rows": lambda d, rows, numbers: (d.index(rows, numbers(2 * ROWS)),),
    "int32": lambda d, rows, numbers: (d.index(rows, numbers(ROWS, dtype=torch.int32)),),
    "index_select, which takes no numbers below zero": lambda d, rows, numbers: (
        d.call(aten.index_select.default, rows, 0, numbers(ROWS)),
    ),
    "columns": columns,
    "elements": elements,
    "a matrix of numbers": matrix_of_numbers,
    "read twice": read_twice,
    "read in two orders": read_in_two_orders,
    "returned too": returned_too,
    "an order behind the finish": computed_behind,
    "a written order": written_order,
}


@pytest.mark.parametrize("name", LOOKALIKES)
def test_lookalikes(dag: RowsDag, name: str) -> None:
    x, made = dag.input("x", ROWS, WIDTH), itertools.count()

    def numbers(*shape: int, dtype: torch.dtype = torch.int64) -> Node:
        with dag.graph.inserting_before(x):
            return dag.numbers(f"order_{next(made)}", *shape, dtype=dtype)

    received = dag.finish(x)
    graph = dag.graph_of(*LOOKALIKES[name](dag, received, numbers))
    before = targets(graph)
    assert read_in_order(graph) == 0
    assert targets(graph) == before


@pytest.mark.parametrize("of", ["a table", "another exchange"])
def test_numbers_that_are_exchanged(dag: RowsDag, of: str) -> None:
    """An exchange of int64 numbers by which rows of something else are read is no order of itself."""
    numbers = dag.numbers("numbers", ROWS)
    x = dag.input("x", ROWS, WIDTH)
    rows = x if of == "a table" else dag.finish(x)
    graph = dag.graph_of(dag.index(rows, dag.finish(numbers)))
    assert read_in_order(graph) == 0
    graph.lint()


def run_written(rank: int, world: int) -> bool:
    """Return whether a user's own graph is right that writes what it has sent, in front of the order."""
    torch.manual_seed(rank)
    splits = [ROWS // world] * world

    def step(x: Tensor, keys: Tensor, w: Tensor) -> Tensor:
        received = funcol.wait_tensor(funcol.all_to_all_single(x, splits, splits, dist.group.WORLD))
        hidden = w @ w
        x.fill_(100.0)
        return received[torch.argsort(keys)] @ hidden

    x, keys, w = torch.randn(ROWS, WIDTH), torch.randn(ROWS), torch.randn(WIDTH, WIDTH)
    want = step(x.clone(), keys, w)
    graph = make_fx(step)(x.clone(), keys, w)
    options = {"overrides": [{"kind": "all_to_all", "strategy": "split"}]}
    got = ub_overlap.apply_passes(graph, (x.clone(), keys, w), options=options)(x.clone(), keys, w)
    return torch.equal(got, want)


def test_what_was_sent_is_written_before_the_order(pool2: RankPool) -> None:
    assert pool2.run(run_written) == [True, True]


def run_layer(rank: int, world: int, routing: str, inner: str) -> tuple[list[int], list[bool]]:
    """Return how many finishes of each graph have an order, and which results are equal in bits without orders."""
    torch._dynamo.reset()
    torch._dynamo.config.capture_scalar_outputs = True
    sizes, tokens = SIZES["tiny"], 16
    torch.manual_seed(rank)
    routes = make_routes(tokens, 2 * world, sizes.top, routing, rank)
    layer = ExpertLayer(sizes, 2, routes, dist.group.WORLD, True).bfloat16()
    x = torch.randn(tokens, sizes.dim).bfloat16().requires_grad_()
    options = {"inner": inner, "overrides": [{"kind": "all_to_all", "strategy": "split"}]}
    counts: list[int] = []
    results: list[Any] = []
    original = rewrite_graph.read_in_order
    try:
        for use in (lambda graph: counts.append(original(graph)), lambda graph: None):
            rewrite_graph.read_in_order = use  # type: ignore[assignment]
            torch._dynamo.reset()
            step = torch.compile(layer, backend="ub_overlap", options=options, fullgraph=True)
            for _ in range(2):
                x.grad = None
                layer.zero_grad()
                out = step(x)
                out.square().sum().backward()
            results.append([out.detach(), x.grad, *(p.grad for p in layer.parameters())])
    finally:
        rewrite_graph.read_in_order = original
    return counts, [torch.equal(a, b) for a, b in zip(*results, strict=True)]


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("routing", full_but(["skewed"], ROUTINGS))
def test_layer(pool2: RankPool, routing: str, inner: str) -> None:
    """The dispatch of forward and the combine's gradient are sorted by local expert. Sums of tokens read several rows."""
    for counts, equal in pool2.run(run_layer, routing, inner):
        assert counts == [1, 1]
        assert all(equal), equal

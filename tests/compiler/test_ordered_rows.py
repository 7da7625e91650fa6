"""Rows of an all_to_all that are read in another order: the finish returns them so, where that is one copy less."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.fx import Graph, Node

from benchmarks.expert_parallel.model import ROUTINGS, SIZES, ExpertLayer, make_routes
from tests.compiler.dags import Dag, aten
from tests.harness.ranks import RankPool
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


@pytest.mark.parametrize("spelling", ["index", "index_select"])
def test_an_order_that_is_there(dag: RowsDag, spelling: str) -> None:
    order = dag.numbers("order", ROWS)
    received = dag.finish(dag.input("x", ROWS, WIDTH))
    rows = dag.index(received, order) if spelling == "index" else dag.call(aten.index_select.default, received, 0, order)
    graph = dag.graph_of(rows)
    assert read_in_order(graph) == 1
    graph.lint()
    assert targets(graph) == ["start_all_to_all", "finish_all_to_all", "permute", "mm"]
    assert received.args[-1] is order and len(received.args) == len(received.target._schema.arguments)
    assert read_in_order(graph) == 0


def test_an_order_that_is_computed_behind_the_finish(dag: RowsDag) -> None:
    """The finish moves behind it, in front of all that reads the rows."""
    keys = dag.numbers("keys", ROWS)
    received = dag.finish(dag.input("x", ROWS, WIDTH))
    graph = dag.graph_of(dag.index(received, dag.call(aten.add.Tensor, keys, 1)))
    assert read_in_order(graph) == 1
    graph.lint()
    assert targets(graph) == ["start_all_to_all", "add", "finish_all_to_all", "permute", "mm"]


def test_an_order_behind_another_collective(dag: RowsDag) -> None:
    """All ranks issue finishes and other collectives in the order of the plan: the finish does not move across one."""
    keys, shard = dag.numbers("keys", ROWS), dag.input("shard", 2, 2)
    received = dag.finish(dag.input("x", ROWS, WIDTH))
    whole = dag.gather(shard)
    graph = dag.graph_of(dag.index(received, dag.call(aten.add.Tensor, keys, 1)), whole)
    assert read_in_order(graph) == 0


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


def written_order(d: RowsDag, rows: Node, numbers: Callable[..., Node]) -> tuple[Node, ...]:
    return (d.index(rows, d.call(aten.add_.Tensor, numbers(ROWS), 1)),)


LOOKALIKES: dict[str, Look] = {
    "fewer rows": lambda d, rows, numbers: (d.index(rows, numbers(ROWS // 2)),),
    "more rows": lambda d, rows, numbers: (d.index(rows, numbers(2 * ROWS)),),
    "int32": lambda d, rows, numbers: (d.index(rows, numbers(ROWS, dtype=torch.int32)),),
    "selected columns": lambda d, rows, numbers: (d.call(aten.index_select.default, rows, 1, numbers(WIDTH)),),
    "columns": columns,
    "elements": elements,
    "a matrix of numbers": matrix_of_numbers,
    "read twice": read_twice,
    "read in two orders": read_in_two_orders,
    "returned too": returned_too,
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


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_layer(pool2: RankPool, routing: str, inner: str) -> None:
    """The dispatch of forward and the combine's gradient are sorted by local expert. Sums of tokens read several rows."""
    for counts, equal in pool2.run(run_layer, routing, inner):
        assert counts == [1, 1]
        assert all(equal), equal

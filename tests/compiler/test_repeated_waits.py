"""A second wait for the result of a collective changes no decision, and waits that are needed stay."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.fx import Graph, Node

from tests.compiler.rank_compile import world_name
from tests.harness.ranks import RankPool
from ub_overlap.compiler.graph.repeated_waits import drop_repeated_waits
from ub_overlap.compiler.reports.history import HISTORY

C10D, ATEN = torch.ops._c10d_functional, torch.ops.aten
WAIT = C10D.wait_tensor.default
Make = Callable[[Graph, Node], Node]


def gathered(graph: Graph, x: Node) -> Node:
    return graph.call_function(C10D.all_gather_into_tensor.default, (x, 2, "0"))


def waited(graph: Graph, x: Node) -> Node:
    return graph.call_function(WAIT, (gathered(graph, x),))


def view(graph: Graph, node: Node) -> Node:
    return graph.call_function(ATEN.view.default, (node, [-1]))


def piece(graph: Graph, node: Node) -> Node:
    return graph.call_function(operator.getitem, (graph.call_function(ATEN.split.Tensor, (node, 1)), 0))


def reduced_in_place(graph: Graph, x: Node) -> Node:
    computed = graph.call_function(ATEN.mul.Tensor, (x, 2))
    return graph.call_function(C10D.all_reduce_.default, (computed, "sum", "0"))


def one_of_several(graph: Graph, x: Node) -> Node:
    several = graph.call_function(C10D.all_reduce_coalesced.default, ([x, x], "sum", "0"))
    return graph.call_function(operator.getitem, (several, 0))


def gathered_into(graph: Graph, x: Node) -> Node:
    given = graph.call_function(ATEN.empty.memory_format, ([8],))
    graph.call_function(C10D.all_gather_into_tensor_out.default, (x, 2, "0"), {"out": given})
    return view(graph, given)


@pytest.mark.parametrize(
    ("make", "dropped"),
    [
        (waited, 1),
        (lambda g, x: view(g, waited(g, x)), 1),
        (lambda g, x: piece(g, waited(g, x)), 1),
        (lambda g, x: g.call_function(ATEN.cat.default, ([piece(g, waited(g, x))], 1)), 1),
        (gathered, 0),
        (lambda g, x: view(g, gathered(g, x)), 0),
        (lambda g, x: piece(g, gathered(g, x)), 0),
        (reduced_in_place, 0),
        (one_of_several, 0),
        (gathered_into, 0),
        (lambda g, x: x, 0),
    ],
    ids=["wait", "view", "piece", "cat", "gather", "view of it", "piece of it", "in place", "coalesced", "into", "input"],
)
def test_only_waits_that_do_nothing_are_dropped(make: Make, dropped: int) -> None:
    graph = Graph()
    ready = make(graph, graph.placeholder("x"))
    before = len(graph.find_nodes(op="call_function", target=WAIT))
    graph.output(graph.call_function(WAIT, (ready,)))
    assert drop_repeated_waits(graph) == dropped
    graph.lint()
    assert len(graph.find_nodes(op="call_function", target=WAIT)) == before + 1 - dropped
    (result,) = graph.find_nodes(op="output")[0].args
    assert (result is ready) == bool(dropped)


def layer(x: Tensor, w1: Tensor, w2: Tensor, group: str, again: Callable[[Tensor], Tensor]) -> Tensor:
    """Sequence-parallel layer of two matmuls, then a sum over ranks. `again`: what is done to each result of a collective."""
    hidden = again(funcol.all_gather_tensor(x, 0, group)) @ w1
    shard = again(funcol.reduce_scatter_tensor(hidden.relu() @ w2, "sum", 0, group))
    columns = again(funcol.all_gather_tensor(shard, 1, group))
    return again(funcol.all_reduce(columns[:, : shard.shape[1]] @ w1, "sum", group))


def decisions(rank: int, world: int) -> list[tuple[list[Any], float]]:
    """Return strategies and reasons of the layer without and with second waits, and the largest difference to eager code."""
    name = world_name()
    found = []
    for again in (lambda t: t, funcol.wait_tensor):
        torch._dynamo.reset()
        torch.manual_seed(3 + rank)
        x = torch.randn(8, 16)
        torch.manual_seed(2)
        weights = [torch.randn(16, 32).requires_grad_(), torch.randn(32, 16).requires_grad_()]
        mark = HISTORY.mark()
        options = {"inner": "aot_eager", "overlap": "force"}
        compiled = torch.compile(layer, backend="ub_overlap", options=options, fullgraph=True)
        outs = [call(x, *weights, name, again) for call in (compiled, layer)]
        errors = [float((outs[0] - outs[1]).abs().max())]
        rows = [(d.kind.value, str(d.strategy), d.reason) for plan in HISTORY.since(mark) for d in plan.decisions]
        found.append((rows, max(errors)))
    return found


def test_a_second_wait_changes_no_decision(pool2: RankPool) -> None:
    for once, twice in pool2.run(decisions):
        assert len(once[0]) == 4 and {strategy for _, strategy, _ in once[0]} != {"none"}, once
        assert once[0] == twice[0]
        assert max(once[1], twice[1]) < 1e-3

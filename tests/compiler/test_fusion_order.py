"""FusionOrder.fuse on random graphs: a group is accepted exactly if the graph stays acyclic."""

from __future__ import annotations

import networkx
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx import Graph, Node

from ub_overlap.compiler.match.fusion_order import FusionOrder
from ub_overlap.compiler.plan.reasons import Reason

aten = torch.ops.aten


@st.composite
def graphs(draw: st.DrawFn, walls: bool = False) -> tuple[Graph, list[Node]]:
    """Draw a graph of additions of any two earlier nodes; with `walls`, some write in place."""
    graph = Graph()
    nodes = [graph.placeholder(f"x{i}") for i in range(2)]
    for _ in range(draw(st.integers(4, 14))):
        a, b = (nodes[draw(st.integers(0, len(nodes) - 1))] for _ in range(2))
        wall = walls and draw(st.integers(0, 5)) == 0
        nodes.append(graph.call_function(aten.add_.Tensor if wall else aten.add.Tensor, (a, b)))
    graph.output(nodes[-1])
    return graph, [n for n in nodes if n.op == "call_function"]


def pick(data: st.DataObject, nodes: list[Node]) -> set[Node]:
    return set(data.draw(st.lists(st.sampled_from(nodes), min_size=2, max_size=4, unique=True)))


def contracted(graph: Graph, groups: list[set[Node]]) -> networkx.DiGraph:
    """Return the graph with each group contracted to one node."""
    whole = {n: min(group) for group in groups for n in group}
    edges = [(whole.get(i, i), whole.get(n, n)) for n in graph.nodes for i in n.all_input_nodes]
    return networkx.DiGraph([(a, b) for a, b in edges if a is not b])


def is_wall(node: Node) -> bool:
    return node.target is aten.add_.Tensor


def keeps_order(order: FusionOrder, graph: Graph, groups: list[set[Node]]) -> None:
    assert sorted(order.items) == sorted(graph.nodes)
    assert [order.position[n] for n in order.items] == list(range(len(order.items)))
    whole = {n: group for group in groups for n in group}
    for n in graph.nodes:
        for i in n.all_input_nodes:
            if whole.get(i) is None or whole.get(i) is not whole.get(n):
                assert order.position[i] < order.position[n], f"{i} feeds {n}"
    for group in groups:
        places = sorted(order.position[n] for n in group)
        assert places == list(range(places[0], places[0] + len(group))), f"{group} is torn apart"


@given(graphs(), st.data())
def test_accepts_exactly_what_stays_acyclic(made: tuple[Graph, list[Node]], data: st.DataObject) -> None:
    graph, nodes = made
    order, groups = FusionOrder(graph), list[set[Node]]()
    for _ in range(5):
        group = pick(data, nodes)
        conflicts = order.conflicts(group)
        refused = order.fuse(group)
        acyclic = networkx.is_directed_acyclic_graph(contracted(graph, [*groups, group]))
        if any(group & other for other in groups):
            assert refused is not None and refused.reason is Reason.MATMUL_TAKEN
            continue
        assert (refused is None) == acyclic == (not conflicts)
        if refused is None:
            groups.append(group)
        else:
            assert refused.reason is Reason.DEPENDENT_OPERAND
        keeps_order(order, graph, groups)
    assert set(order.taken) == {n for group in groups for n in group}


@given(graphs(walls=True), st.data())
def test_nothing_crosses_a_write(made: tuple[Graph, list[Node]], data: st.DataObject) -> None:
    graph, nodes = made
    order, groups = FusionOrder(graph), list[set[Node]]()
    walls = [n for n in nodes if is_wall(n)]
    before = {(n, w): n < w for w in walls for n in nodes if n is not w}
    for _ in range(5):
        group = pick(data, nodes)
        if any(is_wall(n) for n in group) or any(group & other for other in groups):
            continue
        if order.fuse(group) is None:
            groups.append(group)
        keeps_order(order, graph, groups)
        assert {(n, w): order.position[n] < order.position[w] for n, w in before} == before


def test_wall_between_two_members() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    first = graph.call_function(aten.add.Tensor, (x, x))
    wall = graph.call_function(aten.add_.Tensor, (x, 1))
    second = graph.call_function(aten.add.Tensor, (x, x))
    graph.output((first, wall, second))
    refused = FusionOrder(graph).fuse({first, second})
    assert refused is not None and refused.reason is Reason.MUTATION_BARRIER
    assert wall.name in refused.detail


def test_readers_of_sizes_do_not_count() -> None:
    """A reader of a member's sym_size is no dependency, because the size is computed from the graph's inputs."""
    graph = Graph()
    x = graph.placeholder("x")
    first = graph.call_function(aten.add.Tensor, (x, x))
    size = graph.call_function(aten.sym_size.int, (first, 0))
    between = graph.call_function(aten.mul.Tensor, (x, size))
    second = graph.call_function(aten.add.Tensor, (between, first))
    graph.output(second)
    assert FusionOrder(graph).fuse({first, second}) is None

"""Split collectives next to subgraphs that communicate, of uneven shards, and where a size of the result is read; slots."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from tests.compiler.dags import Dag, aten, c10d
from tests.compiler.rank_compile import world_name
from tests.harness.ranks import RankPool
from tests.models.compare import uncached
from ub_overlap.compiler.cost.policy import Policy
from ub_overlap.compiler.match.collectives import find_collectives
from ub_overlap.compiler.match.fusion_order import FusionOrder
from ub_overlap.compiler.match.window import Window, WindowFinder
from ub_overlap.compiler.options import Options
from ub_overlap.compiler.plan.plan import Plan
from ub_overlap.compiler.reports.history import HISTORY
from ub_overlap.compiler.select.decide import decide
from ub_overlap.compiler.windows.landing_result import find_readers, release_position
from ub_overlap.compiler.windows.placement import Item, Limits, Transfer, place
from ub_overlap.compiler.windows.widen import widen_windows

# --- subgraphs ----------------------------------------------------------------------------------------------------------


def subgraph(communicates: bool, depth: int = 0) -> GraphModule:
    """Return relu of an input, or of its gather, in a call at `depth` levels of calls."""
    root, graph = torch.nn.Module(), Graph()
    x = graph.placeholder("x")
    if depth:
        result = append_call(root, graph, x, subgraph(communicates, depth - 1))
    else:
        gathered = graph.call_function(c10d.all_gather_into_tensor.default, (x, 2, "g")) if communicates else x
        result = graph.call_function(aten.relu.default, (gathered,))
    graph.output((result,))
    return GraphModule(root, graph)


def append_call(root: torch.nn.Module, graph: Graph, x: Node, body: GraphModule) -> Node:
    name = f"body_{len(graph.nodes)}"
    root.add_module(name, body)
    attribute = graph.create_node("get_attr", name)
    node = graph.call_function(torch.ops.higher_order.invoke_subgraph, (attribute, name, x))
    node.meta["val"] = x.meta.get("val")
    return node


def between_calls(body: GraphModule) -> tuple[Window, FusionOrder, list[Node]]:
    """Return the window of a parameter's gather between two calls of `body`, and [call, product, call, product]."""
    d, root = Dag(), torch.nn.Module()
    x, w = d.input("x", 64, 64), d.input("primals_1", 32, 64)
    first = append_call(root, d.graph, x, body)
    gathered = d.gather(w)
    product = d.mm(first, gathered)
    second = append_call(root, d.graph, product, body)
    last = d.mm(second, gathered)
    graph = GraphModule(root, d.output(last)).graph
    (c,) = find_collectives(graph)
    return WindowFinder(graph).find(c), FusionOrder(graph), [first, product, second, last]


@pytest.mark.parametrize("depth", [0, 1])
def test_calls_that_communicate_bound_the_window(depth: int) -> None:
    """A subgraph has slots from 0 up as well. So no slot of the graph is taken while it runs, by a zero-copy result neither."""
    window, order, (first, product, _, _) = between_calls(subgraph(True, depth))
    begin, end = window.bounds(order, {})
    assert (begin, end) == (order.position[first] + 1, order.position[product])
    readers = find_readers(window)
    assert readers is not None and release_position(window, readers, order, {}) is None


def test_other_calls_are_passed() -> None:
    """Look-alike: a subgraph that only computes, as of flex_attention."""
    window, order, (first, _, _, last) = between_calls(subgraph(False, 1))
    assert window.bounds(order, {})[0] <= order.position[first]
    readers = find_readers(window)
    assert readers is not None and release_position(window, readers, order, {}) == order.position[last] + 1


def gather(shard: Tensor) -> Tensor:
    return funcol.wait_tensor(funcol.all_gather_tensor(shard, 0, world_name()))


@torch.compiler.nested_compile_region
def block(shard: Tensor, x: Tensor) -> Tensor:
    return torch.relu(x @ gather(shard))


def nested(rank: int, world: int, options: dict[str, Any]) -> tuple[set[str], bool]:
    """Return the strategies of a program with regions, and whether its result is eager's."""

    def program(p: Tensor, q: Tensor, x: Tensor) -> Tensor:
        return block(p, block(p, x)) @ gather(q)

    sizes = ((4, 8, rank), (4, 8, 2 + rank), (8, 8, 4))
    inputs = [torch.randn(m, n, generator=torch.Generator().manual_seed(seed)) for m, n, seed in sizes]
    mark = HISTORY.mark()
    with uncached(), torch.no_grad():
        result = torch.compile(program, backend="ub_overlap", options=options)(*inputs)
        same = torch.allclose(result, program(*inputs), rtol=1e-5)
    return {str(d.strategy) for plan in HISTORY.since(mark) for d in plan.decisions}, same


def test_nested_regions(pool2: RankPool) -> None:
    """Inductor runs the passes on each region. A region and the graph that calls it both split their collectives."""
    options = {"overrides": [{"strategy": "split"}], "zero_copy": "auto"}
    assert pool2.run(nested, options) == [({"split"}, True)] * 2


# --- uneven shards ------------------------------------------------------------------------------------------------------


def plan_of_rank(rows: int, bias: bool, share: float) -> Plan:
    """Return the plan of a rank that owns `rows` of the 2048 rows of a shard, so it pads them, and adds a bias or not.

    `share`: of the port's time that computation hides.
    """
    d = Dag(2)
    x, vector = d.input("x", int(4096 * share) // 64 * 64, 4096), d.input("bias", 4096)
    shards = [d.input(f"primals_{i + 1}", rows, 4096) for i in range(6)]
    gradients = []
    for shard in shards:
        whole = shard if rows == 2048 else d.call(aten.constant_pad_nd.default, shard, [0, 0, 0, 2048 - rows])
        x = d.mm(x, d.gather(whole))
        summed = d.mm(d.t(x), x)
        gradients.append(d.scatter(d.call(aten.add.Tensor, summed, vector) if bias else summed))
    options = Options(profile="h200", min_bytes=0, independent_matmuls="off", split_bytes=40 << 20)
    return decide(d.output(x, *gradients), options, "forward", lambda *_: None).plan


@pytest.mark.parametrize("share", [0.1, 0.3, 0.6, 1.0])
@pytest.mark.parametrize("bias", [False, True])
def test_ranks_with_uneven_shards_agree(share: float, bias: bool) -> None:
    """Only some ranks pad, and only one adds a bias. All choose the same collectives, places and slots."""
    plans = [plan_of_rank(2048, False, share), plan_of_rank(1990, bias, share), plan_of_rank(0, False, share)]
    assert any(d.window is not None for d in plans[0].decisions)
    assert len({plan.shared_digest for plan in plans}) == 1


def filled(rows: int) -> list[str]:
    """Return the order of products around the gather of an activation, on a rank that owns `rows` of 2048 of each weight."""
    d = Dag(2)
    x, a, b = d.input("x", 4096, 4096), d.input("a", 512, 4096), d.input("b", 4096, 512)
    shards = [d.input(f"primals_{i + 1}", rows, 4096) for i in range(4)]
    small = [d.mm(a, b) for _ in range(30)]
    gathered = d.gather(d.call(aten.relu.default, x))
    for shard in shards:
        d.gather(shard if rows == 2048 else d.call(aten.constant_pad_nd.default, shard, [0, 0, 0, 2048 - rows]))
    graph = d.output(d.call(aten.relu.default, gathered), *small)
    assert widen_windows(graph, Policy.of(Options(profile="h200", min_bytes=0)), None) > 0
    return [n.name for n in graph.nodes if n.target in (aten.mm.default, c10d.all_gather_into_tensor.default)]


def test_ranks_with_uneven_shards_fill_windows_alike() -> None:
    assert filled(2048) == filled(1990) == filled(0)


# --- sizes --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_read", [True, False])
def test_a_tensor_whose_size_is_read_does_not_move(is_read: bool) -> None:
    """What computes with the size would move behind the finish with it, maybe behind a write."""
    d = Dag()
    x, w = d.input("x", 64, 64), d.input("w", 64, 64)
    view = d.call(aten.view.default, d.scatter(d.mm(x, w)), [64, 32])
    if is_read:
        d.call(aten.sym_size.int, view, 0)
    graph = d.output(view, d.mm(w, x))
    (c,) = find_collectives(graph)
    last = WindowFinder(graph).find(c).bounds(order := FusionOrder(graph), {})[1]
    assert order.items[last].name == ("view_default" if is_read else "output")


# --- slots --------------------------------------------------------------------------------------------------------------


def test_the_largest_slot_is_the_first() -> None:
    """A forward takes its slots in the order of its layers, backward in the other order. Both give slot 0 the most memory."""

    def slots(sizes: list[int]) -> dict[int, int]:
        """Return bytes by slot, of reductions that are open at the same time."""
        transfers = [Transfer("g", 0, 1, 0, False, 0.0, 9.0, 0.0, 20.0, size, is_required=True) for size in sizes]
        placed = place([Item(1.0), Item(0.0)], transfers, Limits(1 << 30, 8))
        return {p.slot: size for p, size in zip(placed, sizes, strict=True) if p is not None}

    assert slots([10, 40, 20]) == slots([20, 40, 10]) == {0: 40, 1: 20, 2: 10}

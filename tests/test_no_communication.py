"""The baseline "nocomm": Inductor's graph with collectives that take no time."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.fx import Graph

from benchmarks.blocks.no_communication import _results, removal_pass, remove_collectives
from tests.harness.ranks import RankPool

C10D = torch.ops._c10d_functional


def collectives(rank: int, world: int) -> list[str]:
    """Compile a gather, a matmul, a scatter and an all_reduce with the pass. Return errors: the results need no peer."""
    group = dist.group.WORLD
    weight = torch.randn(8, 8)
    removed: list[int] = []

    def layer(x: Tensor) -> tuple[Tensor, Tensor]:
        gathered = funcol.all_gather_tensor(x, 0, group)
        scattered = funcol.reduce_scatter_tensor(gathered @ weight, "sum", 0, group)
        return scattered + x, funcol.all_reduce(x, "sum", group)

    base: Any = type(removal_pass())

    class Counting(base):
        def __call__(self, graph: Graph) -> None:
            removed.append(remove_collectives(graph))

    x = torch.randn(4, 8)
    call = torch.compile(layer, fullgraph=True, options={"post_grad_custom_pre_pass": Counting(), "fx_graph_cache": False})
    bad = []
    if rank == 0:  # alone: a collective would hang
        first, summed = call(x)
        if first.shape != x.shape or not torch.equal(summed, x):
            bad.append(f"results {first.shape}, {summed}")
        if removed != [3]:
            bad.append(f"{removed} collectives removed")
        if not torch.equal(call(x)[0], first):
            bad.append("a second call has another result")
    dist.barrier()
    return bad


def test_compiled_layer(pool2: RankPool) -> None:
    assert pool2.run(collectives) == [[], []]


def live_graphs(rank: int, world: int) -> list[str]:
    """Train a layer whose output is computed in place of a stand-in. Return the graphs that stay alive after a step."""
    group, x = dist.group.WORLD, torch.randn(4, 8, requires_grad=True)
    weight = torch.randn(8, 8, requires_grad=True)

    def layer(x: Tensor) -> Tensor:
        gathered = funcol.all_gather_tensor(x, 0, group)
        return x + funcol.reduce_scatter_tensor(gathered @ weight, "sum", 0, group)

    call = torch.compile(layer, fullgraph=True, options={"post_grad_custom_pre_pass": removal_pass(), "fx_graph_cache": False})
    if rank == 0:
        out = call(x)
        assert out.grad_fn is not None
        aliases = any(out.untyped_storage().data_ptr() == t.untyped_storage().data_ptr() for t in _results.values())
        out.sum().backward()
        if not aliases:
            return ["no output is computed in place: this test shows nothing"]
    dist.barrier()
    return [str(t.grad_fn) for t in _results.values() if t.grad_fn is not None]


def test_no_graph_stays_alive(pool2: RankPool) -> None:
    """A graph that outlives its step keeps gradient accumulators of another stream, and the step cannot be captured."""
    assert pool2.run(live_graphs) == [[], []]


def test_other_nodes_stay() -> None:
    """Only functional collectives are replaced, not ops of the same sizes."""
    graph = Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4, 8, device="meta")
    repeated = graph.call_function(torch.ops.aten.repeat.default, (x, [2, 1]))
    gathered = graph.call_function(C10D.all_gather_into_tensor.default, (x, 2, "group"))
    gathered.meta["val"] = torch.empty(8, 8, device="meta")
    waited = graph.call_function(C10D.wait_tensor.default, (gathered,))
    graph.output((repeated, waited))
    assert remove_collectives(graph) == 1 and remove_collectives(graph) == 0
    left = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    assert left == ["aten.repeat.default", "ub_overlap_benchmarks.stand_in.default"]
    (new,) = [node for node in graph.nodes if "stand_in" in str(node.target)]
    assert new.args == (x, [8, 8]) and new.meta["val"].shape == (8, 8)

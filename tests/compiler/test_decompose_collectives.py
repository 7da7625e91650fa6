"""Ops that communicate and wait inside, as collectives of the graph: the same bits, and look-alikes that stay."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor  # registers _dtensor::shard_dim_alltoall
from torch.distributed.tensor.experimental import _context_parallel  # noqa: F401  (registers cplib)
from torch.fx import Graph, Node

from tests.compiler.dags import Dag, c10d, module_of
from tests.compiler.rank_compile import world_name
from tests.harness.ranks import RankPool
from ub_overlap.compiler.joint.decompose_collectives import decompose_collectives, may_decompose


def opaque_graph(name: str, shapes: list[tuple[int, ...]], arguments: tuple[Any, ...], group: Any, results: int) -> Graph:
    """Return a graph of one op with `shapes` as inputs, that returns all its results."""
    d = Dag(group=group, dtype=torch.float32)
    inputs = [d.input(f"x{i}", *shape) for i, shape in enumerate(shapes)]
    namespace, _, op = name.partition("::")
    made = d.call(getattr(getattr(torch.ops, namespace), op).default, *inputs, *arguments, group)
    parts = [made] if results == 1 else [d.call(operator.getitem, made, i) for i in range(results)]
    return d.output(*parts)


def run(rank: int, world: int, name: str, shapes: list[tuple[int, ...]], arguments: tuple[Any, ...], results: int) -> bool:
    """Return whether the decomposed graph computes what the op computes, bit for bit, with the same layout."""
    group = world_name()
    graph = opaque_graph(name, shapes, arguments, group, results)
    made = torch.Generator().manual_seed(rank)
    inputs = [torch.randn(shape, generator=made) for shape in shapes]
    if name == "_dtensor::shard_dim_alltoall":  # the CPU has no kernel
        gather_dim, shard_dim = arguments
        parts = [torch.empty_like(inputs[0]) for _ in range(world)]
        dist.all_gather(parts, inputs[0])
        expected = (torch.cat(parts, gather_dim).chunk(world, shard_dim)[rank].contiguous(),)
    else:
        expected = module_of(graph)(*inputs)
    assert may_decompose(graph) and decompose_collectives(graph) == 1 and not may_decompose(graph)
    graph.lint()
    found = module_of(graph)(*inputs)
    return all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("dim", [0, 2, -2])
@pytest.mark.parametrize("is_backward", [False, True])
def test_flex_attention(pool2: RankPool, is_backward: bool, dim: int) -> None:
    """Keys and values may have other shapes, as with grouped heads of another width."""
    name = "cplib::flex_cp_allgather" + ("_backward" if is_backward else "")
    assert pool2.run(run, name, [(2, 4, 8, 6), (2, 4, 8, 2)], (dim,), 2) == [True, True]


@pytest.mark.parametrize(("gather_dim", "shard_dim"), [(1, 2), (0, 1), (2, 0)])
def test_dtensor(pool2: RankPool, gather_dim: int, shard_dim: int) -> None:
    arguments = (gather_dim, shard_dim)
    assert pool2.run(run, "_dtensor::shard_dim_alltoall", [(4, 6, 8)], arguments, 1) == [True, True]


def shapes_that_stay(rank: int, world: int) -> list[Node]:
    """Return the nodes of a graph whose dim has no equal parts, after the pass."""
    graph = opaque_graph("_dtensor::shard_dim_alltoall", [(4, 3)], (0, 1), world_name(), 1)
    assert decompose_collectives(graph) == 0
    return [str(n.target) for n in graph.nodes if n.op == "call_function"]  # type: ignore[misc]


def test_uneven_parts_stay_one_op(pool2: RankPool) -> None:
    assert pool2.run(shapes_that_stay) == [["_dtensor.shard_dim_alltoall.default"]] * 2


def test_a_plain_gather_is_not_touched() -> None:
    d = Dag()
    graph = d.output(d.gather(d.input("x", 4, 4)))
    assert not may_decompose(graph) and decompose_collectives(graph) == 0
    assert any(n.target is c10d.all_gather_into_tensor.default for n in graph.nodes)

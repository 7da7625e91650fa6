"""Ops that communicate and wait inside -> collectives of the graph.

    k, v -> cplib.flex_cp_allgather -> gathered k, gathered v
becomes, for k and for v,
    k -> [clone] -> all_gather -> wait -> [split -> cat] -> gathered k

    dk, dv -> cplib.flex_cp_allgather_backward -> own dk, own dv            [split -> cat] -> reduce_scatter -> wait
    x -> _dtensor.shard_dim_alltoall -> y                                   split -> cat -> all_to_all -> wait -> split -> cat

These are the steps of the ops themselves, so results keep their bits. FlexAttention under context parallelism has the first
two, DTensor the third where a tensor is sharded along another dim than before. As one op, nothing could hide them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch.fx import Graph, Node

from ub_overlap import _torch_compat as compat

from ..graph.aten import aten, c10d, shape_of, tensor_of
from ..graph.emitter import Emitter
from ..graph.joint_graph import copy_region, nodes_between
from ..graph.sizes import divide

Group = str


def may_decompose(graph: Graph) -> bool:
    """Return whether the graph has such ops."""
    return any(_qualified_name(n) in _DECOMPOSITIONS for n in graph.nodes)


def decompose_collectives(graph: Graph) -> int:
    """Replace all such ops in place. Return how many. An op whose group the graph computes stays as it is."""
    count = 0
    for node in list(graph.nodes):
        decompose = _DECOMPOSITIONS.get(_qualified_name(node))
        if decompose is None or not isinstance(node.args[-1], str):
            continue
        before = node.prev
        with graph.inserting_before(node):
            results = decompose(_CollectiveEmitter(graph, node), *node.args)
        if results is None:
            continue
        copy_region(node, nodes_between(before, node))
        _replace(graph, node, results)
        count += 1
    return count


def _qualified_name(node: Node) -> str:
    """Return "namespace::name" of a custom op, "" for other nodes."""
    if node.op != "call_function" or not isinstance(node.target, compat.OpOverload):
        return ""
    return node.target._schema.name


def _replace(graph: Graph, node: Node, results: tuple[Node, ...]) -> None:
    if tensor_of(node) is not None:
        node.replace_all_uses_with(results[0])
    else:
        for user in list(node.users):
            assert user.target is operator.getitem, f"{user} reads {node}"
            index = user.args[1]
            assert isinstance(index, int)
            user.replace_all_uses_with(results[index])
            graph.erase_node(user)
    graph.erase_node(node)


class _CollectiveEmitter(Emitter):
    """Emits collectives along any dim, as torch's functional collectives do: they communicate along dim 0."""

    def __init__(self, graph: Graph, origin: Node) -> None:
        super().__init__(graph, origin, {})

    def gather(self, tensor: Node, dim: int, group: Group) -> Node:
        ranks = compat.group_size(group)
        gathered = self._wait(c10d.all_gather_into_tensor.default, self.contiguous(tensor), ranks, group)
        return self.regroup(gathered, ranks, 0, dim)

    def scatter_sum(self, tensor: Node, dim: int, group: Group) -> Node:
        ranks = compat.group_size(group)
        stacked = self.contiguous(self.regroup(tensor, ranks, dim, 0))
        return self._wait(c10d.reduce_scatter_tensor.default, stacked, "sum", ranks, group)

    def exchange(self, tensor: Node, gather_dim: int, shard_dim: int, group: Group) -> Node:
        ranks = compat.group_size(group)
        stacked = self.contiguous(self.regroup(tensor, ranks, shard_dim, 0))
        part = divide(shape_of(stacked)[0], ranks)
        splits = [part if isinstance(part, int) else self._part(stacked, 0, ranks)] * ranks
        exchanged = self._wait(c10d.all_to_all_single.default, stacked, splits, splits, group)
        return self.regroup(exchanged, ranks, 0, gather_dim)

    def regroup(self, tensor: Node, ranks: int, source: int, target: int) -> Node:
        """Cut `tensor` in equal parts along one dim and join them along another."""
        if source == target:
            return tensor
        parts = self.call(aten.split.Tensor, tensor, self._part(tensor, source, ranks), source)
        return self.call(aten.cat.default, [self.item(parts, i) for i in range(ranks)], target)

    def _part(self, tensor: Node, dim: int, ranks: int) -> int | Node:
        part = divide(shape_of(tensor)[dim], ranks)
        if isinstance(part, int):
            return part
        return self.call(operator.floordiv, self.call(aten.sym_size.int, tensor, dim), ranks)

    def _wait(self, target: Any, *args: Any) -> Node:
        return self.call(c10d.wait_tensor.default, self.call(target, *args))


def _gather_both(e: _CollectiveEmitter, k: Node, v: Node, dim: int, group: Group) -> tuple[Node, ...]:
    return tuple(e.gather(t, dim % len(shape_of(t)), group) for t in (k, v))


def _scatter_both(e: _CollectiveEmitter, dk: Node, dv: Node, dim: int, group: Group) -> tuple[Node, ...]:
    return tuple(e.scatter_sum(t, dim % len(shape_of(t)), group) for t in (dk, dv))


def _exchange(e: _CollectiveEmitter, x: Node, gather_dim: int, shard_dim: int, group: Group) -> tuple[Node, ...] | None:
    """Return None where the dim is not cut into equal parts. All ranks see that alike."""
    dims = len(shape_of(x))
    if divide(shape_of(x)[shard_dim % dims], compat.group_size(group)) is None:
        return None
    return (e.exchange(x, gather_dim % dims, shard_dim % dims, group),)


_DECOMPOSITIONS: dict[str, Callable[..., tuple[Node, ...] | None]] = {
    "cplib::flex_cp_allgather": _gather_both,
    "cplib::flex_cp_allgather_backward": _scatter_both,
    "_dtensor::shard_dim_alltoall": _exchange,
}

"""Hybrid sharding (HSDP): all_reduce over replicas, then reduce_scatter over shards -> reduce_scatter, then all_reduce.

    x -> all_reduce(outer) -> wait -> [view | cast | regroup]* -> reduce_scatter(inner) -> wait -> y
becomes
    x -> [view | cast | regroup]* -> reduce_scatter(inner) -> wait -> all_reduce(outer) -> wait -> y

DTensor emits the first form (SimpleFSDP's hybrid_shard), FSDP2 the second. Both sum the same numbers over both groups. The
second sends 1 / inner of the bytes over the outer group, which is the one across hosts.

It holds if the groups are two dims of one mesh: then the ranks of an outer group own the same shard of their inner groups.
A rank knows its own groups only. In a row-major mesh of all ranks they follow from a rank, strides and sizes, which ranks
compare as a part of the plan. Other groups keep their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from ub_overlap import _torch_compat as compat

from ..cost.site_sizes import hints_of
from ..cost.traffic import bytes_sent_in
from ..graph.aten import PADS, Effect, aten, c10d, constant_scaling, dtype_of, element_effect, node_arg
from ..graph.emitter import Emitter
from ..graph.joint_graph import copy_region
from ..graph.matmul import FLOATS
from ..match.collectives import Collective, Op, find_collectives, read_again, read_collective
from ..match.widening_cast import moved_tensors
from .joint_decision import record_decision
from .merge.limits import MergeLimits


@dataclass(frozen=True, slots=True)
class _Pair:
    """An all_reduce, the reduce_scatter of its result, and the nodes in between, in graph order."""

    reduce: Collective
    scatter: Collective
    between: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class MeshDim:
    """A dim of a row-major mesh over all ranks: rank r is at position r // stride % size of it."""

    stride: int
    size: int

    def __str__(self) -> str:
        return f"{self.size} ranks {self.stride} apart"

    def is_orthogonal_to(self, other: MeshDim) -> bool:
        """Return whether both are dims of one mesh: a step in one does not change the position in the other."""
        return self.stride % (other.stride * other.size) == 0 or other.stride % (self.stride * self.size) == 0


def scatter_first(graph: Graph) -> int:
    """Reorder all such pairs in place. Return how many. A pair that keeps its order has the reason in its record."""
    collectives = find_collectives(graph)
    if not any(c.op is Op.ALL_REDUCE for c in collectives):
        return 0
    limits = MergeLimits(graph)
    count = 0
    for scatter in (read_again(c) for c in collectives if c.op is Op.REDUCE_SCATTER):  # in place of an all_reduce, maybe
        pair = _find_pair(scatter) if scatter.wait is not None else None
        if pair is None:
            continue
        if why := _why_not(pair, limits):
            record_decision(scatter.node, change_note=f"not moved in front of {pair.reduce.node.name}: {why}")
            continue
        limits.position |= dict.fromkeys(_reorder(graph, pair), limits.position[scatter.node])
        count += 1
    return count


def _find_pair(scatter: Collective) -> _Pair | None:
    """Return the all_reduce whose result `scatter` reads, through nodes that move, cast or scale elements."""
    todo, between, waits = {scatter.input}, set[Node](), set[Node]()
    while todo:
        node = todo.pop()
        if node.target is c10d.wait_tensor.default and node_arg(node).target is c10d.all_reduce.default:
            waits.add(node)
            continue
        between.add(node)
        sources = [node_arg(node)] if constant_scaling(node) else moved_tensors(node)
        if not sources:
            return None
        todo.update(n for n in sources if n not in between)
    if len(waits) != 1:
        return None
    reduce = read_collective(node_arg(waits.pop()))
    return _Pair(reduce, scatter, tuple(sorted(between))) if reduce.wait is not None else None


def _why_not(pair: _Pair, limits: MergeLimits) -> str:
    """Return why a pair keeps its order; "" where it may change."""
    reduce, scatter = pair.reduce, pair.scatter
    inside = {reduce.node, reduce.wait, *pair.between, scatter.node}
    if reduce.reduce_op != scatter.reduce_op or reduce.reduce_op not in ("sum", "avg"):
        return f"they reduce with {reduce.reduce_op} and {scatter.reduce_op}; both must be sum, or both avg"
    for node in (reduce.node, reduce.wait, *pair.between):
        assert node is not None
        for user in node.users:
            if user not in inside:
                return f"{user.name} reads {node.name} as well"
    for node in pair.between:
        if node.target in PADS:
            return f"{node.name} pads uneven shards"
        effect = element_effect(node)
        if effect is not None and effect.kind is Effect.CAST and dtype_of(effect.source).itemsize > dtype_of(node).itemsize:
            return f"{node.name} narrows the sum to {dtype_of(node)}"
    if not {dtype_of(reduce.input), dtype_of(scatter.input)} <= set(FLOATS):
        return f"they reduce {dtype_of(reduce.input)} and {dtype_of(scatter.input)}"
    if limits.is_written_between(reduce.input, limits.position[reduce.node], limits.position[scatter.node]):
        return f"{reduce.input.name} is written in between"
    if reduce.group is None or scatter.group is None:
        return "the graph computes a group"
    dims = _mesh_dims(reduce.group, scatter.group)
    return "" if dims is not None else "their groups are not two dims of a row-major mesh of all ranks"


def _mesh_dims(outer: str, inner: str) -> tuple[MeshDim, MeshDim] | None:
    """Return the dims of a mesh that two groups of this rank are."""
    found = [mesh_dim(compat.group_ranks(name), dist.get_rank()) for name in (outer, inner)]
    if found[0] is None or found[1] is None or not found[0].is_orthogonal_to(found[1]):
        return None
    return found[0], found[1]


def mesh_dim(ranks: Sequence[int], rank: int) -> MeshDim | None:
    """Return the dim of a mesh whose group of `rank` is `ranks`; None for other groups, and for groups of one rank."""
    if len(ranks) < 2 or ranks[1] <= ranks[0]:
        return None
    dim = MeshDim(ranks[1] - ranks[0], len(ranks))
    at = rank // dim.stride % dim.size
    return dim if list(ranks) == [rank + (i - at) * dim.stride for i in range(dim.size)] else None


def mesh_signature() -> tuple[str, ...]:
    """Return the mesh dims of all groups by name, for cache keys: names do not tell the ranks.

    Ranks of one mesh have equal dims, so they share cached graphs.
    """
    dims = {g.group_name: mesh_dim(compat.global_ranks(g), dist.get_rank()) for g in compat.process_groups()}
    return tuple(sorted(f"{name}:{dim}" for name, dim in dims.items()))


def _reorder(graph: Graph, pair: _Pair) -> tuple[Node, Node]:
    """Return the new reduce_scatter and all_reduce."""
    reduce, scatter = pair.reduce, pair.scatter
    assert reduce.wait is not None and scatter.wait is not None and reduce.group is not None and scatter.group is not None
    hints = hints_of(graph)
    with graph.inserting_before(scatter.node):
        e = Emitter(graph, scatter.node, {})
        copies = {reduce.wait: reduce.input}
        for node in pair.between:
            target = aten.reshape.default if node.target is aten.view.default else node.target  # strides may be others
            args, kwargs = map_arg((node.args, node.kwargs), lambda n: copies.get(n, n))
            copies[node] = e.call(target, *args, **kwargs)
        scattered = e.call(scatter.node.target, copies[scatter.input], *scatter.node.args[1:], **scatter.node.kwargs)
        shard = e.call(c10d.wait_tensor.default, scattered)
    with graph.inserting_before(scatter.wait):
        e = Emitter(graph, reduce.node, {})
        reduced = e.call(reduce.node.target, shard, *reduce.node.args[1:], **reduce.node.kwargs)
        result = e.call(c10d.wait_tensor.default, reduced)
    copy_region(scatter.node, (*copies.values(), scattered, shard, reduced, result))
    scatter.wait.replace_all_uses_with(result)
    for node in (scatter.wait, scatter.node, *reversed(pair.between), reduce.wait, reduce.node):
        graph.erase_node(node)
    own = read_collective(reduced)
    sent = bytes_sent_in(own, dtype_of(shard).itemsize, hints)
    traced = None if sent is None else sent * scatter.ranks * dtype_of(reduce.input).itemsize // dtype_of(shard).itemsize
    dims = _mesh_dims(reduce.group, scatter.group)
    assert dims is not None
    note = f"moved behind {scattered.name} (scatter_first)"
    record_decision(
        reduced,
        reordered=f"{dims[1]}, then {dims[0]}",
        change_note=note if sent is None else f"{note}: sends {sent} bytes instead of {traced}",
        saved_bytes=None if sent is None or traced is None else traced - sent,
    )
    return scattered, reduced

"""Sums of reductions -> reductions of sums: the backward of q, k, v and of w1, w3 sends half the bytes or less.

    x1 -> view* -> all_reduce -> wait -> view* \\
                                                add      becomes     add(x1, x2) -> view* -> all_reduce -> wait
    x2 -> view* -> all_reduce -> wait -> view* /

Sums with other terms between are regrouped first (sums.py). The same holds for reduce_scatter. Its views may include a cat
that regroups another dim by shards. Both operands must be regrouped alike.

Sound for "sum" and "avg" over the same group when nothing else reads either result. A matmul that other nodes read keeps its
own reduction: it can be pipelined with that one, but not with the reduction of a sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import Graph, Node
from torch.fx.node import map_arg

from ...graph.aten import Effect, ShardBlocks, aten, dtype_of, element_effect, shape_of
from ...graph.emitter import Emitter
from ...graph.joint_graph import copy_region
from ...graph.matmul import is_matmul
from ...graph.sizes import is_same, is_same_shape
from ...match.collectives import Collective, Op, read_again, read_collective
from ...match.view_chain import follow_regroup
from ..joint_decision import joint_decision, record_decision
from .limits import MergeLimits
from .sums import Sum, find_sum, regroup


@dataclass(frozen=True, slots=True)
class _Reduced:
    """The input of a reduction. `value`: the tensor that it is a view of; `views`: the nodes in between, in graph order."""

    collective: Collective
    value: Node
    views: tuple[Node, ...]
    blocks: ShardBlocks
    """The layout of the shards in `value`."""


def merge_reductions(graph: Graph, reductions: Sequence[Collective], limits: MergeLimits) -> int:
    """Merge sums of `reductions` in place, as far as `limits` allow. Return how many were removed."""
    if len(reductions) < 2:
        return 0
    by_wait: dict[Node | None, Collective] = {c.wait: c for c in reductions}
    count = 0
    for node in list(graph.nodes):
        found = _find_sum(node, by_wait)
        if found is None:
            continue
        total, first, second = found
        a, b = _reduced(first), _reduced(second)
        if not _can_merge(node, a, b):
            continue
        at = limits.position[node]
        begin = min((limits.position[n] for n in total.inner), default=at)
        others = [*total.vectors, *([total.other] if total.other is not None else [])]
        if any(limits.is_written_between(n, begin, at) for n in others):
            continue
        if not _hold(node, a, b, limits):
            continue
        sums = regroup(graph, total)
        limits.position |= dict.fromkeys(sums, at)
        merged = _merge(graph, sums[0], a, b)
        limits.position[merged.node] = at
        by_wait[merged.wait] = merged
        count += 1
    return count


def has_sums(graph: Graph, reductions: Sequence[Collective]) -> bool:
    """Return whether the graph adds the results of two of `reductions`."""
    by_wait: dict[Node | None, Collective] = {c.wait: c for c in reductions}
    adds = graph.find_nodes(op="call_function", target=aten.add.Tensor)
    return len(by_wait) > 1 and any(_find_sum(node, by_wait) is not None for node in adds)


def _find_sum(node: Node, by_wait: dict[Node | None, Collective]) -> tuple[Sum, Collective, Collective] | None:
    """Return the sum that `node` is of two reductions, and those."""
    found = find_sum(node, lambda n: _find_reduction(n, by_wait) is not None)
    if found is None:
        return None
    a, b = (_find_reduction(n, by_wait) for n in (found.first, found.second))
    assert a is not None and b is not None
    return found, read_again(a), read_again(b)  # a sum that was merged before may be their input


def _find_reduction(node: object, by_wait: dict[Node | None, Collective]) -> Collective | None:
    """Return the reduction that `node` is a view of, if it and all views in between have no other user."""
    while isinstance(node, Node) and len(node.users) == 1:
        if node in by_wait:
            return by_wait[node] if len(by_wait[node].node.users) == 1 else None
        step = element_effect(node)
        if step is None or step.kind is not Effect.SAME:
            return None
        node = step.source
    return None


def _reduced(c: Collective) -> _Reduced:
    chain = follow_regroup(c, can_regroup=c.op is Op.REDUCE_SCATTER)
    return _Reduced(c, chain.root, tuple(reversed(chain.nodes)), chain.blocks)


def _can_merge(add: Node, a: _Reduced, b: _Reduced) -> bool:
    """Return whether `add` sums two reductions of one kind, group, operation, type and order of shards."""
    first, second = a.collective, b.collective
    return (
        first.node is not second.node
        and (first.op, first.group, first.reduce_op) == (second.op, second.group, second.reduce_op)
        and first.reduce_op in ("sum", "avg")
        and not any(is_matmul(r.value) and _has_other_readers(r) for r in (a, b))
        and dtype_of(a.value) == dtype_of(b.value) == dtype_of(add)
        and all(is_same_shape(shape_of(x), shape_of(add)) for x in add.all_input_nodes)
        and is_same(a.blocks.outer, b.blocks.outer)
        and is_same(a.blocks.inner, b.blocks.inner)
    )


def _has_other_readers(r: _Reduced) -> bool:
    """Return whether nodes outside of the reduction read the value that is reduced."""
    inside = {*r.views, r.collective.node}
    return any(user not in inside and not _reads_sizes(user, r.value) for user in r.value.users)


def _reads_sizes(user: Node, value: Node) -> bool:
    """Return whether `user` reads only the sizes of `value`, as the copy of an in-place reduction, functionalized."""
    return user.target is aten.sym_size.int or (user.target is aten.copy.default and user.args[1] is not value)


def _hold(add: Node, a: _Reduced, b: _Reduced, limits: MergeLimits) -> bool:
    """Hold both inputs until `add`, in place of the results. Return False if they change or the memory limit is too low."""
    held, end = [], limits.position[add]
    for r in (a, b):
        begin = limits.position[r.collective.node]
        if limits.is_written_between(r.value, begin, end):
            return False
        held.append((begin + 1, end, limits.bytes_of(r.value) - limits.bytes_of(r.collective.node)))
    return limits.try_hold(held)


def _merge(graph: Graph, add: Node, a: _Reduced, b: _Reduced) -> Collective:
    old, wait_target = a.collective.node, a.collective.wait.target  # type: ignore[union-attr]
    e = Emitter(graph, old, {})
    with graph.inserting_before(add):
        total = e.call(aten.add.Tensor, a.value, e.reshape(b.value, shape_of(a.value)))
        copies = {a.value: total}
        for view in a.views:
            target = aten.reshape.default if view.target is aten.view.default else view.target  # `total` may have other strides
            args, kwargs = map_arg((view.args, view.kwargs), lambda n: copies.get(n, n))
            copies[view] = e.call(target, *args, **kwargs)
        reduction = e.call(old.target, copies.get(a.collective.input, total), *old.args[1:])
        wait = e.call(wait_target, reduction)
        result = e.reshape(wait, shape_of(add))
    one, other = (joint_decision(r.collective.node) for r in (a, b))
    saved = None if one.saved_bytes is None or other.saved_bytes is None else one.saved_bytes + other.saved_bytes
    note = one.change_note or other.change_note
    record_decision(reduction, merged_count=one.merged_count + other.merged_count, saved_bytes=saved, change_note=note)
    copy_region(add, (*copies.values(), reduction, wait, result))
    unread = set(add.all_input_nodes)
    add.replace_all_uses_with(result)
    graph.erase_node(add)
    while unread:  # the old views, waits and reductions: c10d ops look impure, so dead-code elimination keeps them
        node = unread.pop()
        if not node.users and node not in (a.value, b.value):
            unread.update(node.all_input_nodes)
            graph.erase_node(node)
    return read_collective(reduction)

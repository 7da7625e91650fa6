"""Repeated elements are sent once, and gradients of repeats are summed before they are sent.

    k -> expand -> clone -> all_gather -> wait -> cut -> attention
becomes
    k -> all_gather -> wait -> cut -> expand -> clone -> attention

    attention's gradient -> all_to_all -> wait -> add -> view -> sum over repeats
becomes
    attention's gradient -> view -> sum over repeats -> all_to_all -> wait -> add

torch's ring attention knows no grouped heads: keys and values are repeated for all query heads in front of it, so each step
sends them several times, and their gradients too. A model that repeats the keys of Ulysses or of a gather does so as well.

Forward keeps its bits. Gradients are summed in another order: over the heads of a group first, then over the ranks. So sums
move in backward only, in groups in which repeats of the same number have been sent once.

Ranks of a ring have other graphs, and must send messages of one size. Repeats are found along the exchanges alone, whatever
attends on a rank. Sums are found by what reads them: each rank must pass on what it receives, as torch's ring does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch.fx import Graph, Node

from ub_overlap import _torch_compat as compat

from ...graph.aten import CUTS, aten, shape_of
from ...graph.emitter import Emitter
from ...graph.joint_graph import copy_region, nodes_between
from ...match.collectives import read_collective
from ..joint_decision import record_decision
from .find_repeats import Found, bytes_of, find_repeated, find_summed, nodes_behind, other_users, readers_of, wider_type
from .passed_on import EXCHANGES, emit_smaller, needed
from .repeat import Repeat

_ZEROS = (aten.zeros_like.default, aten.zeros.default)


def may_send_once(graph: Graph, least_bytes: int = 0) -> bool:
    """Return whether `send_once` would change the graph."""
    has_collective = any(graph.find_nodes(op="call_function", target=t) for t in EXCHANGES)
    return has_collective and bool(find_repeated(graph, least_bytes).exchanges)


def send_once(graph: Graph, least_bytes: int = 0) -> int:
    """Rewrite `graph` in place. Return the number of collectives that send less.

    `least_bytes`: a collective that would send less than that stays.
    """
    repeated = find_repeated(graph, least_bytes)
    if not repeated.exchanges:
        return 0
    sent = {(read_collective(n).group, repeated.repeats[n].count) for n in repeated.exchanges}
    _repeat_behind(graph, repeated)
    summed = find_summed(graph, sent, least_bytes)
    if summed.exchanges:
        _sum_in_front(graph, summed)
    return len(repeated.exchanges) + len(summed.exchanges)


def _repeat_behind(graph: Graph, found: Found) -> None:
    """Send what is repeated once, and repeat it where it is read."""
    behind = nodes_behind(found.exchanges, found.repeats)
    smaller = _Smaller(graph, found, _not_repeated)
    smaller.emit(behind)
    for node in behind:
        if others := other_users(node, behind):
            again = smaller.emit_at(
                smaller[node], node, partial(_repeat, node, smaller[node], found.repeats[node]), is_saved=False
            )
            for user in others:
                user.replace_input_with(node, again)
    smaller.erase_unread(behind)


def _sum_in_front(graph: Graph, found: Found) -> None:
    """Send sums over repeats, where only these are read."""
    behind = nodes_behind(found.exchanges, {**found.repeats, **dict.fromkeys(found.sums)})
    smaller = _Smaller(graph, found, _sum)
    roots = [n for n in behind if n in found.sums]
    smaller.emit(n.args[0] for n in roots if isinstance(n.args[0], Node))
    for root in roots:
        source = root.args[0]
        assert isinstance(source, Node)
        # A tensor of its own, as a sum is: other gradients lie in the same message.
        root.replace_all_uses_with(smaller.emit_at(root, root, partial(_copy_shaped, smaller[source], root)))
    smaller.erase_unread(behind)


class _Smaller:
    """T of nodes with a repeat, emitted once for each (passed_on.py)."""

    def __init__(self, graph: Graph, found: Found, first: Callable[[Node, Repeat, Emitter], Node]) -> None:
        """`first`: emits T of a node that passes no repeats on."""
        self._graph, self._found, self._first = graph, found, first
        self._made: dict[Node, Node] = {}
        self._splits: dict[Node, Node] = {}

    def __getitem__(self, node: Node) -> Node:
        return self._made[node]

    def emit(self, wanted: Iterable[Node]) -> None:
        """Emit T of `wanted`, and of all that it needs."""
        todo, all_needed = list(wanted), set[Node]()
        while todo:
            node = todo.pop()
            if node not in all_needed:
                all_needed.add(node)
                todo += (needed(node, self._found.repeats[node]) or ()) if node in self._found.passing else ()
        for node in sorted(all_needed):
            passes = node in self._found.passing
            what = partial(self._emit_passed_on if passes else self._first, node, self._found.repeats[node])
            self._made[node] = self.emit_at(node, node, what)
            if passes and node.target in EXCHANGES:
                _record(node, self._made[node])

    def erase_unread(self, behind: Iterable[Node]) -> None:
        """Erase `behind`, and what T was emitted of, as far as nothing reads it."""
        for node in sorted({*behind, *self._made}, reverse=True):
            for user in [u for u in node.users if not u.users and u.target in CUTS]:
                self._graph.erase_node(user)
            if not node.users:
                self._graph.erase_node(node)

    def _emit_passed_on(self, node: Node, repeat: Repeat, e: Emitter) -> Node:
        return emit_smaller(e, node, repeat, self._made, self._splits)

    def emit_at(self, place: Node, node: Node, what: Callable[[Emitter], Node], is_saved: bool = True) -> Node:
        """Emit `what` behind `place`, in the region of `node`.

        `is_saved`: a policy that saves `node` for backward is one for that too. Else what it is made of is saved.
        """
        region = node
        if node.op == "placeholder":  # it has no region
            place, region = self._graph.find_nodes(op="placeholder")[-1], readers_of(node)[0]
        before = place.next
        with self._graph.inserting_before(before):
            made = what(Emitter(self._graph, region, {}, inputs=()))
        emitted = nodes_between(place, before)
        copy_region(region, emitted)
        if not is_saved and not compat.is_computed_again(region.meta.get("recompute")):
            for n in emitted:
                n.meta.pop("recompute", None)
        return made


def _not_repeated(node: Node, repeat: Repeat, e: Emitter) -> Node:
    """Emit what an expand repeats."""
    return e.call(aten.expand.default, node.args[0], repeat.shape_without(shape_of(node)))


def _sum(node: Node, repeat: Repeat, e: Emitter) -> Node:
    """Emit the sum over repeats of `node`, in the type of what reads it where that has more bits."""
    shape, value = tuple(repeat.shape_without(shape_of(node))), node.meta["val"]
    dtype = wider_type(node) or value.dtype
    if node.target in _ZEROS:
        return e.call(aten.full.default, list(shape), 0, dtype=dtype, device=value.device)
    apart = e.reshape(node, tuple(repeat.shape_apart(shape_of(node))))
    return e.reshape(e.call(aten.sum.dim_IntList, apart, [repeat.dim + 1], dtype=dtype), shape)


def _repeat(node: Node, smaller: Node, repeat: Repeat, e: Emitter) -> Node:
    """Emit `smaller` with each element repeated, with the shape of `node`, and its strides where these are dense."""
    value = node.meta["val"]
    apart = repeat.shape_apart(value.shape)
    one = [1 if d == repeat.dim + 1 else size for d, size in enumerate(apart)]
    expanded = e.call(aten.expand.default, e.reshape(smaller, tuple(one)), apart)
    whole = e.reshape(e.call(aten.clone.default, expanded, memory_format=torch.contiguous_format), tuple(value.shape))
    return whole if value.is_contiguous() else _copy_shaped(whole, node, e)


def _copy_shaped(node: Node, like: Node, e: Emitter) -> Node:
    """Emit a copy of `node` with the shape of `like`, and its strides where these are dense."""
    node, value = e.reshape(node, shape_of(like)), like.meta["val"]
    order = sorted(range(value.dim()), key=lambda d: value.stride(d), reverse=True)
    if value.is_contiguous() or not value.permute(order).is_contiguous():
        return e.call(aten.clone.default, node, memory_format=torch.contiguous_format)
    return e.call(aten.permute.default, e.permute(node, order), [order.index(d) for d in range(value.dim())])


def _record(traced: Node, sent: Node) -> None:
    before, after = bytes_of(traced), bytes_of(sent)
    note = f"what is repeated is sent once: {after} bytes instead of {before}"
    record_decision(sent, change_note=note, saved_bytes=before - after)

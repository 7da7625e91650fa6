"""Repeated elements are sent once, and gradients of repeats are summed before they are sent.

    k -> expand -> clone -> all_gather -> wait -> cut -> attention
becomes
    k -> all_gather -> wait -> cut -> expand -> clone -> attention

    attention's gradient -> all_to_all -> wait -> add -> view -> sum over repeats
becomes
    attention's gradient -> view -> sum over repeats -> all_to_all -> wait -> add

torch's ring attention knows no grouped heads: keys and values are repeated for all query heads in front of it, so each step
sends them several times, and their gradients too. A model that repeats the keys of Ulysses or of a gather does so as well.

Forward keeps its bits. Gradients are summed in another order: over the heads of a group first, then over the ranks. Ranks of a
ring have other graphs. All of them have the same exchanges, and repeats are found along these alone, not by what attends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch.fx import Graph, Node

from ...cost.traffic import bytes_sent_in
from ...graph.aten import CUTS, aten, dtype_of, is_getitem, shape_of
from ...graph.emitter import Emitter
from ...graph.joint_graph import copy_region
from ...match.collectives import read_collective
from ..joint_decision import record_decision
from .passed_on import EXCHANGES, carried, emit_smaller, is_static, needed
from .repeat import Repeat

_ZEROS = (aten.zeros_like.default, aten.zeros.default)


def may_send_once(graph: Graph) -> bool:
    """Return whether `send_once` would change the graph."""
    if not any(graph.find_nodes(op="call_function", target=t) for t in EXCHANGES):
        return False
    return bool(_repeated(graph)[1] or _only_summed(graph)[2])


def send_once(graph: Graph) -> int:
    """Rewrite `graph` in place. Return the number of collectives that send less."""
    return _repeat_behind(graph) + _sum_in_front(graph)


def _repeat_behind(graph: Graph) -> int:
    """Send what is repeated once, and repeat it where it is read."""
    repeats, exchanges = _repeated(graph)
    if not exchanges:
        return 0
    behind = _behind(exchanges, repeats)
    smaller = _Smaller(graph, repeats, _not_repeated)
    smaller.emit(behind)
    for node in behind:
        _read_again(node, behind, repeats[node], smaller)
    smaller.erase_unread(behind)
    return len(exchanges)


def _sum_in_front(graph: Graph) -> int:
    """Send sums over repeats, where only these are read."""
    repeats, sums, exchanges = _only_summed(graph)
    if not exchanges:
        return 0
    behind = _behind(exchanges, {**repeats, **sums})
    smaller = _Smaller(graph, repeats, _sum)
    roots = [n for n in behind if n in sums]
    smaller.emit([n.args[0] for n in roots if isinstance(n.args[0], Node)])
    for root in roots:
        source = root.args[0]
        assert isinstance(source, Node)
        with graph.inserting_before(root):
            e = Emitter(graph, root, {})
            result = e.cast(e.reshape(smaller[source], shape_of(root)), dtype_of(root))
        copy_region(root, [result] if result is not smaller[source] else [])
        root.replace_all_uses_with(result)
    smaller.erase_unread(behind)
    return len(exchanges)


def _repeat_of(node: Node) -> Repeat | None:
    """Return the repeat that `node` makes: the largest of an expand of known sizes."""
    if node.target is not aten.expand.default or not is_static(node):
        return None
    source = node.args[0]
    if not isinstance(source, Node) or not is_static(source) or source.meta["val"].numel() == 1:
        return None  # a constant is no data: as the gradient of a sum it is of no use behind a collective
    shape, before = shape_of(node), shape_of(source)
    padded = [1] * (len(shape) - len(before)) + list(before)
    counts = [n if n != b else 1 for n, b in zip(shape, padded, strict=True)]
    most = max(counts, default=1)
    return Repeat(counts.index(most), most) if most > 1 else None


def _summed(node: Node) -> Repeat | None:
    """Return the repeat that a sum over one dim adds up."""
    if node.target is not aten.sum.dim_IntList or not isinstance(node.args[0], Node) or not is_static(node.args[0]):
        return None
    dims, shape = node.args[1], shape_of(node.args[0])
    if not isinstance(dims, Sequence) or len(dims) != 1 or not isinstance(dims[0], int):
        return None
    dim = dims[0] % len(shape)
    return Repeat(dim, shape[dim]) if shape[dim] > 1 and node.args[0].meta["val"].is_floating_point() else None


def _repeated(graph: Graph) -> tuple[dict[Node, Repeat], list[Node]]:
    """Return the nodes with repeats, and the collectives among them."""
    repeats: dict[Node, Repeat] = {}
    for node in graph.nodes:
        found = _repeat_of(node)
        if found is None and (is_getitem(node) or any(i in repeats for i in node.all_input_nodes)):
            found = carried(node, repeats)
        if found is not None:
            repeats[node] = found
    return repeats, [n for n in repeats if n.target in EXCHANGES and any(u in repeats for u in n.users)]


def _only_summed(graph: Graph) -> tuple[dict[Node, Repeat], dict[Node, Repeat], list[Node]]:
    """Return the nodes that are read in sums over repeats only, these sums, and the collectives among the nodes."""
    found: dict[Node, Repeat] = {}
    sums: dict[Node, Repeat] = {}
    asked: dict[Node, dict[Node, Repeat]] = {}
    for node in reversed(graph.nodes):
        wanted = asked.get(node, {})
        own = next(iter(wanted.values()), None)
        if own is not None and all(r == own for r in wanted.values()) and wanted.keys() == set(_readers(node)):
            found[node] = own
            inputs = needed(node, own) or {}
        elif (summed := _summed(node)) is not None:
            sums[node] = summed
            inputs = {node.args[0]: summed}  # type: ignore[dict-item]
        else:
            continue
        for source, repeat in inputs.items():
            asked.setdefault(source, {})[node] = repeat
    return found, sums, [n for n, repeat in found.items() if n.target in EXCHANGES and needed(n, repeat) is not None]


def _readers(node: Node) -> list[Node]:
    """Return the users of `node`. Those of a split are its parts."""
    cuts = [u for u in node.users if u.users and all(map(is_getitem, u.users))]
    return [u for u in node.users if u not in cuts] + [part for u in cuts for part in u.users]


def _behind(exchanges: Iterable[Node], repeats: dict[Node, Repeat]) -> list[Node]:
    """Return `exchanges` and all nodes behind them with repeats, in graph order."""
    found, todo = set[Node](), list(exchanges)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += [u for u in _readers(node) if u in repeats]
    return sorted(found)


class _Smaller:
    """T of nodes with a repeat, emitted once for each (passed_on.py)."""

    def __init__(self, graph: Graph, repeats: dict[Node, Repeat], first: Callable[[Emitter, Node, Repeat], Node]) -> None:
        """`first`: emits T of a node whose inputs have no repeats."""
        self._graph, self._repeats, self._first = graph, repeats, first
        self._made: dict[Node, Node] = {}

    def __getitem__(self, node: Node) -> Node:
        return self._made[node]

    def emit(self, wanted: Iterable[Node]) -> None:
        """Emit T of `wanted`, and of all that it needs."""
        todo, all_needed = list(wanted), dict[Node, list[Node]]()
        while todo:
            node = todo.pop()
            if node not in all_needed:
                all_needed[node] = list(needed(node, self._repeats[node]) or {})
                todo += all_needed[node]
        for node in sorted(all_needed):
            before = node.next
            with self._graph.inserting_before(before):
                e = Emitter(self._graph, node, {})
                made = self._made[node] = self._emit(e, node, bool(all_needed[node]))
            new, emitted = list[Node](), before.prev
            while emitted is not node:
                new.append(emitted)
                emitted = emitted.prev
            copy_region(node, new)
            if node.target in EXCHANGES and all_needed[node]:
                _record(node, made)

    def erase_unread(self, behind: Iterable[Node]) -> None:
        """Erase `behind`, and what T was emitted of, as far as nothing reads it."""
        for node in sorted({*behind, *self._made}, reverse=True):
            for user in [u for u in node.users if not u.users and u.target in CUTS]:
                self._graph.erase_node(user)
            if not node.users:
                self._graph.erase_node(node)

    def _emit(self, e: Emitter, node: Node, is_passed_on: bool) -> Node:
        repeat = self._repeats[node]
        return emit_smaller(e, node, repeat, self._made) if is_passed_on else self._first(e, node, repeat)


def _not_repeated(e: Emitter, node: Node, repeat: Repeat) -> Node:
    """Emit what an expand repeats."""
    return e.call(aten.expand.default, node.args[0], repeat.shape_without(shape_of(node)))


def _sum(e: Emitter, node: Node, repeat: Repeat) -> Node:
    """Emit the sum over repeats of `node`, in fp32 where all that read it are."""
    shape, value = tuple(repeat.shape_without(shape_of(node))), node.meta["val"]
    is_wider = all(u.meta["val"].dtype is torch.float32 for u in _readers(node))
    dtype = torch.float32 if is_wider and value.dtype in (torch.bfloat16, torch.float16) else value.dtype
    if node.target in _ZEROS:
        return e.call(aten.full.default, list(shape), 0, dtype=dtype, device=value.device)
    apart = e.reshape(node, tuple(repeat.shape_apart(shape_of(node))))
    return e.reshape(e.call(aten.sum.dim_IntList, apart, [repeat.dim + 1], dtype=dtype), shape)


def _read_again(node: Node, behind: list[Node], repeat: Repeat, smaller: _Smaller) -> None:
    """Let the users of `node` that pass no repeats on read T of it, repeated."""
    passing = set(behind)
    parts = {p for u in node.users if u not in passing and u.users and all(map(is_getitem, u.users)) for p in u.users}
    users = [u for u in node.users if u not in passing and not (u.users and set(u.users) <= parts & passing)]
    if not users:
        return
    graph, first = node.graph, smaller[node]
    before = first.next
    with graph.inserting_before(before):
        e = Emitter(graph, node, {})
        again = _repeat(e, first, repeat, node.meta["val"])
    new, emitted = list[Node](), before.prev
    while emitted is not first:
        new.append(emitted)
        emitted = emitted.prev
    copy_region(node, new)
    for user in users:
        user.replace_input_with(node, again)


def _repeat(e: Emitter, smaller: Node, repeat: Repeat, value: torch.Tensor) -> Node:
    """Emit `smaller` with each element repeated, with the shape of `value`, and its strides where these are dense."""
    apart = repeat.shape_apart(value.shape)
    one = [1 if d == repeat.dim + 1 else size for d, size in enumerate(apart)]
    expanded = e.call(aten.expand.default, e.reshape(smaller, tuple(one)), apart)
    whole = e.reshape(e.call(aten.clone.default, expanded, memory_format=torch.contiguous_format), tuple(value.shape))
    order = sorted(range(value.dim()), key=lambda d: value.stride(d), reverse=True)
    if value.is_contiguous() or not value.permute(order).is_contiguous():
        return whole
    return e.call(aten.permute.default, e.permute(whole, order), [order.index(d) for d in range(value.dim())])


def _record(traced: Node, sent: Node) -> None:
    before, after = (bytes_sent_in(read_collective(n), dtype_of(n).itemsize, {}) for n in (traced, sent))
    assert before is not None and after is not None
    note = f"what is repeated is sent once: {after} bytes instead of {before}"
    record_decision(sent, change_note=note, saved_bytes=before - after)

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

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from ...cost.traffic import bytes_sent_in
from ...graph.aten import CUTS, PERMUTES, VIEWS, aten, c10d, dtype_of, is_getitem, is_mutable, shape_of, storage_node
from ...graph.emitter import Emitter
from ...graph.joint_graph import copy_region, is_in_backward
from ...match.collectives import read_collective
from ..joint_decision import record_decision
from .passed_on import ADDABLE, EXCHANGES, carried, emit_smaller, is_static, needed, passes_sums
from .repeat import Repeat

_ZEROS = (aten.zeros_like.default, aten.zeros.default)
_MATMULS = (aten.mm.default, aten.addmm.default, aten._scaled_mm.default)
"""With these a gather may be fused, which hides more than fewer bytes save."""


@dataclass(frozen=True, slots=True)
class _Found:
    """Nodes with their repeats."""

    repeats: Mapping[Node, Repeat]
    passing: Collection[Node]
    """Those whose inputs have repeats too, which they pass on."""
    exchanges: Sequence[Node]
    """The collectives among these: they can send less."""
    sums: Collection[Node] = ()
    """Of gradients: the sums over repeats that are read in the end."""


def may_send_once(graph: Graph, least_bytes: int = 0) -> bool:
    """Return whether `send_once` would change the graph."""
    has_collective = any(graph.find_nodes(op="call_function", target=t) for t in EXCHANGES)
    return has_collective and bool(_find_repeated(graph, least_bytes).exchanges)


def send_once(graph: Graph, least_bytes: int = 0) -> int:
    """Rewrite `graph` in place. Return the number of collectives that send less.

    `least_bytes`: a collective that would send less than that stays.
    """
    repeated = _find_repeated(graph, least_bytes)
    if not repeated.exchanges:
        return 0
    sent = {(read_collective(n).group, repeated.repeats[n].count) for n in repeated.exchanges}
    _repeat_behind(graph, repeated)
    summed = _find_summed(graph, sent, least_bytes)
    if summed.exchanges:
        _sum_in_front(graph, summed)
    return len(repeated.exchanges) + len(summed.exchanges)


def _repeat_behind(graph: Graph, found: _Found) -> None:
    """Send what is repeated once, and repeat it where it is read."""
    behind = _behind(found.exchanges, found.repeats)
    smaller = _Smaller(graph, found, _not_repeated)
    smaller.emit(behind)
    for node in behind:
        if others := _other_users(node, behind):
            again = smaller.emit_behind(node, _repeat)
            for user in others:
                user.replace_input_with(node, again)
    smaller.erase_unread(behind)


def _sum_in_front(graph: Graph, found: _Found) -> None:
    """Send sums over repeats, where only these are read."""
    behind = _behind(found.exchanges, {**found.repeats, **dict.fromkeys(found.sums)})
    smaller = _Smaller(graph, found, _sum)
    roots = [n for n in behind if n in found.sums]
    smaller.emit(n.args[0] for n in roots if isinstance(n.args[0], Node))
    for root in roots:
        source = root.args[0]
        assert isinstance(source, Node)
        with graph.inserting_before(root):
            result = Emitter(graph, root, {}, inputs=()).reshape(smaller[source], shape_of(root))
        if result is not smaller[source]:
            copy_region(root, [result])
        root.replace_all_uses_with(result)
    smaller.erase_unread(behind)


def _find_repeated(graph: Graph, least_bytes: int) -> _Found:
    """Find what repeats its elements, from the expand on."""
    written = _written(graph)
    left = set[Node]()
    """Collectives that stay as they are."""
    while True:
        repeats, passing = _follow_repeats(graph, written, left)
        exchanges = [n for n in passing if n.target in EXCHANGES]
        small = {n for n in exchanges if _bytes_sent(n, repeats[n].count) < least_bytes or not n.users}
        groups = dict.fromkeys(read_collective(n).group for n in exchanges)
        for group in groups if not small else ():
            own = [n for n in exchanges if read_collective(n).group == group]
            if any(_reads_place_or_matmul(u) for n in _behind(own, repeats) for u in n.users if u not in repeats):
                small.update(own)
        if not small:
            return _Found(repeats, passing, exchanges)
        left |= small


def _follow_repeats(graph: Graph, written: Collection[Node], left: Collection[Node]) -> tuple[dict[Node, Repeat], set[Node]]:
    """Return the nodes with repeats, and those that pass them on. `left`: collectives that do not."""
    repeats: dict[Node, Repeat] = {}
    passing = set[Node]()
    for node in graph.nodes:
        found = _repeat_of(node)
        is_passed = found is None
        if found is None and node not in left and (is_getitem(node) or any(i in repeats for i in node.all_input_nodes)):
            found = carried(node, repeats)
        if found is not None and storage_node(node) not in written:
            repeats[node] = found
            passing |= {node} if is_passed else set()
    return repeats, passing


def _find_summed(graph: Graph, sent: Collection[tuple[str | None, int]], least_bytes: int) -> _Found:
    """Find gradients that are read in sums over repeats only. `sent`: groups, and how often what they sent was repeated."""
    asked: dict[Node, dict[Node, Repeat]] = {}
    repeats: dict[Node, Repeat] = {}
    sums = set[Node]()
    for node in reversed(graph.nodes):
        wanted = asked.get(node, {})
        own = next(iter(wanted.values()), None)
        if own is not None and all(r == own for r in wanted.values()) and wanted.keys() == set(_readers(node)):
            repeats[node] = own
            inputs = needed(node, own) or {}
        elif (summed := _summed(node)) is not None and any(summed.count == count for _, count in sent):
            sums.add(node)
            inputs = {node.args[0]: summed}  # type: ignore[dict-item]
        else:
            continue
        if node in sums or passes_sums(node, inputs):
            for source, repeat in inputs.items():
                asked.setdefault(source, {})[node] = repeat
    left = {
        n
        for n, repeat in repeats.items()
        if n.target in EXCHANGES
        and not (
            is_in_backward(n)
            and (read_collective(n).group, repeat.count) in sent
            and _bytes_sent(n, repeat.count) >= least_bytes
        )
    }
    written = _written(graph)
    while True:
        passing = _passing_sums(repeats, written, left)
        reached = set[Node]()
        """Nodes whose readers all lead to sums, through nodes that pass them on."""
        for node in repeats:  # the last node first
            if all(u in sums or (u in passing and u in reached) for u in _readers(node)):
                reached.add(node)
        exchanges = [n for n in passing if n.target in EXCHANGES]
        unread = {n for n in exchanges if n not in reached}
        if not unread:
            return _Found(repeats, passing, exchanges, sums)
        left |= unread  # else it would be sent once more


def _passing_sums(repeats: Mapping[Node, Repeat], written: Collection[Node], left: Collection[Node]) -> set[Node]:
    """Return the nodes whose sums over repeats can be made of those of their inputs. `repeats`: the last node first."""
    passing = set[Node]()
    for node in reversed(repeats):  # type: ignore[call-overload]
        inputs = needed(node, repeats[node]) or {}
        is_known = bool(inputs) and all(repeats.get(i) == r for i, r in inputs.items()) and passes_sums(node, inputs)
        if not is_known or node in left or _is_read_wider(node) or storage_node(node) in written:
            continue
        if node.target is not c10d.wait_tensor.default or next(iter(inputs)) in passing:
            passing.add(node)
    return passing


def _bytes_sent(exchange: Node, count: int = 1) -> int:
    """Return the bytes that a rank sends in `exchange`, if each `count` elements were one."""
    sent = bytes_sent_in(read_collective(exchange), dtype_of(exchange).itemsize, {})
    assert sent is not None, "its sizes are known"
    return sent // count


def _is_read_wider(node: Node) -> bool:
    """Return whether what reads `node` adds it up in fp32, and `node` has fewer bits: so must its sum over repeats."""
    narrow = dtype_of(node) in (torch.bfloat16, torch.float16)
    return narrow and any(u.meta["val"].dtype is torch.float32 for u in _readers(node))


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
    """Return the repeat that a sum over one dim adds up, in the type of its terms."""
    if node.target is not aten.sum.dim_IntList or not isinstance(node.args[0], Node) or not is_static(node.args[0]):
        return None
    dims, shape = node.args[1], shape_of(node.args[0])
    if not isinstance(dims, Sequence) or len(dims) != 1 or not isinstance(dims[0], int) or not shape:
        return None
    dim, dtype = dims[0] % len(shape), dtype_of(node)
    is_plain = dtype in ADDABLE and dtype == dtype_of(node.args[0])
    return Repeat(dim, shape[dim]) if is_plain and shape[dim] > 1 else None


def _written(graph: Graph) -> set[Node]:
    """Return the nodes whose memory the graph writes to: what they hold depends on the place where it is read."""
    return {storage_node(i) for n in graph.nodes if n.op == "call_function" and is_mutable(n) for i in n.all_input_nodes}


def _readers(node: Node) -> list[Node]:
    """Return the users of `node`. Those of a split are its parts."""
    cuts = [u for u in node.users if u.users and all(map(is_getitem, u.users))]
    return [u for u in node.users if u not in cuts] + [part for u in cuts for part in u.users]


def _other_users(node: Node, passing: Collection[Node]) -> list[Node]:
    """Return the users of `node` that are not in `passing`. A split counts as its parts, unless only some of them are."""

    def passes(user: Node) -> bool:
        return user in passing or (user.target in CUTS and all(part in passing for part in user.users))

    return [u for u in node.users if not passes(u)]


def _reads_place_or_matmul(user: Node) -> bool:
    """Return whether `user` reads memory by its place, or is a matmul that a gather may be fused with."""
    todo = [user]
    while todo:
        node = todo.pop()
        if node.target is aten.as_strided.default or node.target in _MATMULS:
            return True
        if node.target in VIEWS or node.target in PERMUTES:
            todo += node.users
    return False


def _behind(exchanges: Iterable[Node], repeats: Mapping[Node, object]) -> dict[Node, None]:
    """Return `exchanges` and all nodes behind them with repeats, in graph order."""
    found, todo = set[Node](), list(exchanges)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += [u for u in _readers(node) if u in repeats]
    return dict.fromkeys(sorted(found))


class _Smaller:
    """T of nodes with a repeat, emitted once for each (passed_on.py)."""

    def __init__(self, graph: Graph, found: _Found, first: Callable[[Emitter, Node, Node, Repeat], Node]) -> None:
        """`first`: emits T of a node that passes no repeats on."""
        self._graph, self._found, self._first = graph, found, first
        self._made: dict[Node, Node] = {}

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
            what = (lambda e, n, _, r: emit_smaller(e, n, r, self._made)) if passes else self._first
            self._made[node] = self._emit(node, node, what)
            if passes and node.target in EXCHANGES:
                _record(node, self._made[node])

    def emit_behind(self, node: Node, what: Callable[[Emitter, Node, Node, Repeat], Node]) -> Node:
        """Emit `what` is made of T of `node`."""
        return self._emit(self._made[node], node, what)

    def erase_unread(self, behind: Iterable[Node]) -> None:
        """Erase `behind`, and what T was emitted of, as far as nothing reads it."""
        for node in sorted({*behind, *self._made}, reverse=True):
            for user in [u for u in node.users if not u.users and u.target in CUTS]:
                self._graph.erase_node(user)
            if not node.users:
                self._graph.erase_node(node)

    def _emit(self, place: Node, node: Node, what: Callable[[Emitter, Node, Node, Repeat], Node]) -> Node:
        """Emit what `what(emitter, node, place, repeat)` makes behind `place`, in the region of `node`."""
        before = place.next
        with self._graph.inserting_before(before):
            made = what(Emitter(self._graph, node, {}, inputs=()), node, place, self._found.repeats[node])
        emitted = before.prev
        while emitted is not place:
            copy_region(node, [emitted])
            emitted = emitted.prev
        return made


def _not_repeated(e: Emitter, node: Node, _: Node, repeat: Repeat) -> Node:
    """Emit what an expand repeats."""
    return e.call(aten.expand.default, node.args[0], repeat.shape_without(shape_of(node)))


def _sum(e: Emitter, node: Node, _: Node, repeat: Repeat) -> Node:
    """Emit the sum over repeats of `node`, in fp32 where all that read it are."""
    shape, value = tuple(repeat.shape_without(shape_of(node))), node.meta["val"]
    is_wider = all(u.meta["val"].dtype is torch.float32 for u in _readers(node))
    dtype = torch.float32 if is_wider and value.dtype in (torch.bfloat16, torch.float16) else value.dtype
    if node.target in _ZEROS:
        return e.call(aten.full.default, list(shape), 0, dtype=dtype, device=value.device)
    apart = e.reshape(node, tuple(repeat.shape_apart(shape_of(node))))
    return e.reshape(e.call(aten.sum.dim_IntList, apart, [repeat.dim + 1], dtype=dtype), shape)


def _repeat(e: Emitter, node: Node, smaller: Node, repeat: Repeat) -> Node:
    """Emit `smaller` with each element repeated, with the shape of `node`, and its strides where these are dense."""
    value = node.meta["val"]
    apart = repeat.shape_apart(value.shape)
    one = [1 if d == repeat.dim + 1 else size for d, size in enumerate(apart)]
    expanded = e.call(aten.expand.default, e.reshape(smaller, tuple(one)), apart)
    whole = e.reshape(e.call(aten.clone.default, expanded, memory_format=torch.contiguous_format), tuple(value.shape))
    order = sorted(range(value.dim()), key=lambda d: value.stride(d), reverse=True)
    if value.is_contiguous() or not value.permute(order).is_contiguous():
        return whole
    return e.call(aten.permute.default, e.permute(whole, order), [order.index(d) for d in range(value.dim())])


def _record(traced: Node, sent: Node) -> None:
    before, after = _bytes_sent(traced), _bytes_sent(sent)
    note = f"what is repeated is sent once: {after} bytes instead of {before}"
    record_decision(sent, change_note=note, saved_bytes=before - after)

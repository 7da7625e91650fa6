"""Numbers that the host reads for exchanges: in one copy, while the device computes.

    item(counts, 0), item(counts, 1), item(received, 0), item(received, 1)
    rows = index(x, order)
    all_to_all(rows, numbers)
becomes
    start_host_read(counts, received)
    rows = index(x, order)
    finish_host_read, four numbers
    all_to_all(rows, numbers)

Each number that is read alone lets the device idle until the host has read it and has issued more. What an exchange sends is
often computed without its numbers: it is issued before the host waits. Numbers are read together up to the first tensor that
needs one of them.

Behind such an exchange the host has issued nothing yet. So of what runs in its window, matmuls come first: while they run, the
host issues the many short kernels.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch.fx import Graph, Node

from ub_overlap.runtime.ops import host_read as host_read  # registers the ops

from ..cost.policy import Policy
from ..graph.aten import aten, c10d, dtype_of, is_mutable, node_arg, shape_of, tensor_of
from ..graph.compute import is_compute
from ..graph.emitter import Emitter
from ..graph.sizes import numel
from ..match.all_to_all import host_reads
from ..match.collectives import Collective, find_collectives, is_collective, read_collective
from .widen import is_barrier, may_move

MAX_NUMBERS = 4096
"""Elements of a tensor that are copied to the host for one of them."""
_INTEGERS = (torch.int32, torch.int64)
_ASSERTS = (aten._assert_scalar.default, aten.sym_constrain_range_for_size.default)


@dataclass(frozen=True, slots=True)
class _Read:
    """`node` reads an element of `source`: `index` of all its elements in a row."""

    node: Node
    source: Node
    index: int


@dataclass(slots=True)
class _Together:
    """Reads of one copy. `numbers`: they and what is computed from them up to `first`, the first node that is no number."""

    reads: list[_Read] = field(default_factory=list)
    numbers: list[Node] = field(default_factory=list)
    first: Node | None = None


def read_together(graph: Graph, policy: Policy) -> int:
    """Change a graph in place. Return how many numbers are read together with others, or while the device computes."""
    exchanges = _find_exchanges(graph, policy)
    wanted = {read for c in exchanges for read in host_reads(c)}
    if not wanted:
        return 0
    return sum(_emit(graph, together, exchanges) for together in _find_together(graph, wanted))


def issue_compute_first(graph: Graph, policy: Policy) -> int:
    """Move the matmuls in the windows of exchanges for which the host reads numbers to their front. Return how many moved."""
    exchanges = [c for c in _find_exchanges(graph, policy) if host_reads(c)]
    return sum(map(_issue_compute_first, exchanges))


def _find_exchanges(graph: Graph, policy: Policy) -> list[Collective]:
    """Return all exchanges, none where no collective may be split."""
    if not policy.may_split:
        return []
    nodes = graph.find_nodes(op="call_function", target=c10d.all_to_all_single.default)
    return [c for c in map(read_collective, nodes) if c.wait is not None and c.group is not None]


def _find_together(graph: Graph, wanted: Collection[Node]) -> list[_Together]:
    """Return the reads of `wanted` that can be made together, each in one set."""
    found, this, numbers = list[_Together](), _Together(), set[Node]()

    def close(first: Node) -> None:
        nonlocal this, numbers
        this.first = first
        if this.reads:
            found.append(this)
        this, numbers = _Together(), set[Node]()

    for node in graph.nodes:
        read = _as_read(node) if node in wanted else None
        if read is not None:
            if this.reads and _device(read.source) != _device(this.reads[0].source):
                close(node)
            this.reads.append(read)
        elif numbers.isdisjoint(node.all_input_nodes):
            if is_mutable(node) and this.reads:  # it may write what is read
                close(node)
            continue
        elif not _is_number(node):
            close(node)
            continue
        this.numbers.append(node)
        numbers.add(node)
    return found


def _is_number(node: Node) -> bool:
    """Return whether `node` computes a number from numbers, or checks one."""
    return node.target in _ASSERTS or isinstance(node.meta.get("val"), torch.SymInt | torch.SymBool)


def _as_read(node: Node) -> _Read | None:
    """Return what a read of the host reads, if it is an element of a small tensor of integers."""
    element, path = node_arg(node), list[tuple[int, object]]()
    while element.target is aten.select.int:
        path.append((element.args[1], element.args[2]))  # type: ignore[arg-type]
        element = node_arg(element)
    source = _on_the_device(element, node)
    value = tensor_of(source)
    if value is None or value.dtype not in _INTEGERS or source.target is torch.ops.ub_overlap.finish_host_read.default:
        return None
    sizes = list(value.shape)
    if not all(isinstance(size, int) for size in sizes) or math.prod(sizes) > MAX_NUMBERS:
        return None
    left, index = list(range(len(sizes))), 0
    for dim, place in reversed(path):
        if not isinstance(place, int):
            return None
        dim = left.pop(dim)
        index += place % sizes[dim] * math.prod(sizes[dim + 1 :])
    return _Read(node, source, index)


def _on_the_device(source: Node, read: Node) -> Node:
    """Return what `source` is a copy of on the host, if nothing writes in front of `read`, else `source`."""
    inner = source.args[0] if source.target is aten._to_copy.default else None
    if not isinstance(inner, Node) or source.kwargs.get("device") != torch.device("cpu"):
        return source
    node = source
    while node is not read:
        if is_mutable(node):
            return source
        node = node.next
    return inner if dtype_of(inner) == dtype_of(source) else source


def _device(source: Node) -> torch.device | None:
    value = tensor_of(source)
    return None if value is None else value.device


def _emit(graph: Graph, together: _Together, exchanges: Sequence[Collective]) -> int:
    """Read the numbers in one copy. Return how many there are."""
    position = {n: i for i, n in enumerate(graph.nodes)}
    first = together.first
    assert first is not None
    sources = list(dict.fromkeys(read.source for read in together.reads))
    after = _sent_before(first, together, exchanges, position)
    if len(together.reads) == 1 and not after:
        return 0
    written = [i for n, i in position.items() if i < position[together.reads[0].node] and is_mutable(n)]
    at = max([*map(position.__getitem__, sources), *written[-1:]])
    begin = next(n for n in list(graph.nodes)[at + 1 :] if n.op != "placeholder")
    ops = torch.ops.ub_overlap
    with graph.inserting_before(begin):
        e = Emitter(graph, sources[0], {})
        offsets = [0, *accumulate(int(numel(shape_of(source))) for source in sources)]
        read, element = (e.empty(shape, torch.int64, torch.device("cpu")) for shape in ((offsets[-1],), ()))
        started = e.call(ops.start_host_read.default, sources, value_is=read)
    moved = _only_for(after, sources, first, position)
    with graph.inserting_before(first):
        numbers = e.call(ops.finish_host_read.default, started, after, value_is=read)
        for r in together.reads:
            before, place = r.node.args[0], offsets[sources.index(r.source)] + r.index
            r.node.args = (e.call(aten.select.int, numbers, 0, place, value_is=element),)
            while isinstance(before, Node) and before is not r.source and not before.users:
                unread, before = before, before.args[0]
                graph.erase_node(unread)
    for node in together.numbers:
        first.prepend(node)
    for node in moved:
        numbers.prepend(node)
    return len(together.reads)


def _only_for(sent: Sequence[Node], sources: Collection[Node], first: Node, position: Mapping[Node, int]) -> list[Node]:
    """Return what computes `sent` and is read by nothing else in front of `first`, in order: the device has it to do while the
    host waits. What hides another collective is not taken from it."""
    hiding = _positions_in_windows(first.graph, position)
    written = max((i for n, i in position.items() if i < position[first] and is_barrier(n)), default=-1)
    found, todo = set[Node](), list(sent)
    while todo:
        node = todo.pop()
        place = position[node]
        if node in found or node in sources or place <= written or place in hiding or not may_move(node):
            continue
        if any(position[u] < position[first] for u in node.users if u not in found):
            continue
        found.add(node)
        todo += node.all_input_nodes
    return sorted(found, key=position.__getitem__)


def _positions_in_windows(graph: Graph, position: Mapping[Node, int]) -> set[int]:
    """Return the positions between a collective and the first reader of its result."""
    inside = set[int]()
    for c in find_collectives(graph):
        if c.wait is not None:
            readers = [position[u] for u in c.wait.users if u in position]
            inside.update(range(position[c.node] + 1, min(readers, default=position[c.wait])))
    return inside


def _sent_before(first: Node, together: _Together, exchanges: Sequence[Collective], position: dict[Node, int]) -> list[Node]:
    """Return what the next exchange with these numbers sends, if that is computed in front of `first`."""
    own = {read.node for read in together.reads}
    for c in sorted(exchanges, key=lambda c: position[c.node]):
        if own.isdisjoint(host_reads(c)):
            continue
        return [c.input] if c.input.op == "call_function" and position[c.input] < position[first] else []
    return []


def _issue_compute_first(c: Collective) -> int:
    """Move the matmuls of one window, and what feeds them there, behind the exchange. Return the number of matmuls."""
    assert c.wait is not None
    inside, results, node = list[Node](), {c.node}, c.node.next
    while not is_barrier(node):
        if node.target is c10d.wait_tensor.default:  # also of another collective: what is issued in front of it hides both
            results.add(node)
        elif not results.isdisjoint(node.all_input_nodes):
            if not _is_number(node):  # the first reader
                break
            results.add(node)
        elif is_collective(node):  # it starts where it was
            break
        inside.append(node)
        node = node.next
    members = set(inside)
    chosen = set[Node]()
    for matmul in filter(_is_matmul, inside):
        needed, todo = set[Node](), [matmul]
        while todo:
            n = todo.pop()
            if n in members and n not in needed:
                needed.add(n)
                todo += n.all_input_nodes
        if needed.isdisjoint(results) and all(map(may_move, needed)):
            chosen |= needed
    last = c.node
    for n in inside:
        if n in chosen:
            last.append(n)
            last = n
    return sum(map(_is_matmul, chosen))


def _is_matmul(node: Node) -> bool:
    return is_compute(node) and not is_collective(node)

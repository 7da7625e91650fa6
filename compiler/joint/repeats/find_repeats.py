"""Find repeats along collectives: what repeats its elements, and gradients of which only sums over repeats are read."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from ...cost.traffic import bytes_sent_in
from ...graph.aten import (
    CUTS,
    PERMUTES,
    VIEWS,
    aten,
    c10d,
    dtype_of,
    is_getitem,
    shape_of,
    storage_node,
    tensor_of,
    written_memory,
)
from ...graph.joint_graph import is_in_backward, needs_tangents
from ...match.collectives import read_collective
from .passed_on import ADDABLE, EXCHANGES, carried, is_static, needed, passes_sums
from .repeat import Repeat

_MATMULS = (aten.mm.default, aten.addmm.default, aten._scaled_mm.default)
"""With these a gather may be fused, which hides more than fewer bytes save."""


@dataclass(frozen=True, slots=True)
class Found:
    """Nodes with their repeats."""

    repeats: Mapping[Node, Repeat]
    passing: Collection[Node]
    """Those whose inputs have repeats too, which they pass on."""
    exchanges: Sequence[Node]
    """The collectives among these: they can send less."""
    sums: Collection[Node] = ()
    """Of gradients: the sums over repeats that are read in the end."""


def find_repeated(graph: Graph, least_bytes: int) -> Found:
    """Find what repeats its elements, from the expand on."""
    written = written_memory(graph)
    left = set[Node]()  # collectives that stay as they are
    while True:
        repeats, passing = _follow_repeats(graph, written, left)
        exchanges = [n for n in passing if n.target in EXCHANGES]
        unfit = {n for n in exchanges if bytes_of(n, repeats[n].count) < least_bytes or not _is_awaited(n)}
        groups = dict.fromkeys(read_collective(n).group for n in exchanges)
        for group in groups if not unfit else ():
            own = [n for n in exchanges if read_collective(n).group == group]
            if any(_reads_place_or_matmul(u) for n in nodes_behind(own, repeats) for u in n.users if u not in repeats):
                unfit.update(own)
        if not unfit:
            return Found(repeats, passing, exchanges)
        left |= unfit


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
            if is_passed:
                passing.add(node)
    return repeats, passing


def find_summed(graph: Graph, sent: Collection[tuple[str | None, int]], least_bytes: int) -> Found:
    """Find gradients that are read in sums over repeats only. `sent`: groups, and how often what they sent was repeated."""
    written = written_memory(graph)
    asked: dict[Node, dict[Node, Repeat]] = {}
    repeats: dict[Node, Repeat] = {}
    leaves: dict[Node, Repeat] = {}
    sums = set[Node]()
    for node in reversed(graph.nodes):
        own = _agreed(node, asked.get(node, {})) if storage_node(node) not in written else None
        is_read_otherwise = own is not None and asked[node].keys() != set(readers_of(node))
        inputs: Mapping[Node, Repeat]
        if own is not None and is_read_otherwise:
            leaves[node] = own
        if own is not None and not is_read_otherwise:
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
    backward = needs_tangents(graph)  # custom functions have no marks of backward

    def may_send(n: Node, repeat: Repeat) -> bool:
        was_sent = (read_collective(n).group, repeat.count) in sent
        is_large = bytes_of(n, repeat.count) >= least_bytes
        return was_sent and (n in backward or is_in_backward(n)) and is_large and _is_awaited(n)

    left = {n for n, repeat in repeats.items() if n.target in EXCHANGES and not may_send(n, repeat)}
    while True:
        passing = _passing_sums(repeats, leaves, left)
        reached = set[Node]()  # nodes whose readers all lead to sums, through nodes that pass them on
        for node in repeats:  # the last node first
            if all(u in sums or (u in passing and u in reached) for u in readers_of(node)):
                reached.add(node)
        exchanges = [n for n in passing if n.target in EXCHANGES]
        unread = {n for n in exchanges if n not in reached}
        if not unread:
            return Found({**repeats, **leaves}, passing, exchanges, sums)
        left |= unread  # else it would be sent once more


def _passing_sums(repeats: Mapping[Node, Repeat], leaves: Mapping[Node, Repeat], left: Collection[Node]) -> set[Node]:
    """Return the nodes whose sums over repeats can be made of those of their inputs. `repeats`: the last node first.

    `leaves`: inputs that are read otherwise as well.
    """
    passing = set[Node]()
    for node in reversed(repeats):  # type: ignore[call-overload]
        inputs = needed(node, repeats[node]) or {}
        is_known = bool(inputs) and all(r in (repeats.get(i), leaves.get(i)) for i, r in inputs.items())
        if not is_known or not passes_sums(node, inputs) or node in left or wider_type(node) is not None:
            continue
        if node.target is not c10d.wait_tensor.default or next(iter(inputs)) in passing:
            passing.add(node)
    return passing


def bytes_of(exchange: Node, count: int = 1) -> int:
    """Return the bytes that a rank sends in `exchange`, if each `count` elements were one."""
    sent = bytes_sent_in(read_collective(exchange), dtype_of(exchange).itemsize, {})
    assert sent is not None, "its sizes are known"
    return sent // count


def _is_awaited(exchange: Node) -> bool:
    """Return whether waits read `exchange`, and nothing else."""
    return bool(exchange.users) and all(u.target is c10d.wait_tensor.default for u in exchange.users)


def _agreed(node: Node, asked: Mapping[Node, Repeat]) -> Repeat | None:
    """Return the repeat over which those who ask for sums of `node` all sum. None also where a sum would need two types."""
    own = next(iter(asked.values()), None)
    if own is None or any(r != own for r in asked.values()):
        return None
    types = {_dtype(u) for u in readers_of(node)}
    wider = {t for t in types if t is not None and _has_more_bits(t, dtype_of(node))}
    return own if not wider or len(types) == 1 else None


def wider_type(node: Node) -> torch.dtype | None:
    """Return the type in which what reads `node` adds it up, if it has more bits: its sum over repeats must have them too."""
    types = map(_dtype, readers_of(node))
    return next((t for t in types if t is not None and _has_more_bits(t, dtype_of(node))), None)


def _dtype(node: Node) -> torch.dtype | None:
    """Return the type of a tensor, None of other values."""
    value = tensor_of(node)
    return None if value is None else value.dtype


def _has_more_bits(one: torch.dtype, other: torch.dtype) -> bool:
    return one != other and torch.promote_types(one, other) == one


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
    if node.target is not aten.sum.dim_IntList or len(node.args) < 2:
        return None
    if not isinstance(node.args[0], Node) or not is_static(node.args[0]):
        return None
    dims, shape = node.args[1], shape_of(node.args[0])
    if not isinstance(dims, Sequence) or len(dims) != 1 or not isinstance(dims[0], int) or not shape:
        return None
    dim, dtype = dims[0] % len(shape), dtype_of(node)
    is_plain = dtype in ADDABLE and dtype == dtype_of(node.args[0])
    return Repeat(dim, shape[dim]) if is_plain and shape[dim] > 1 else None


def readers_of(node: Node) -> list[Node]:
    """Return the users of `node`. Those of a split are its parts."""
    cuts = [u for u in node.users if u.users and all(map(is_getitem, u.users))]
    return [u for u in node.users if u not in cuts] + [part for u in cuts for part in u.users]


def other_users(node: Node, passing: Collection[Node]) -> list[Node]:
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


def nodes_behind(exchanges: Iterable[Node], repeats: Mapping[Node, object]) -> dict[Node, None]:
    """Return `exchanges` and all nodes behind them with repeats, in graph order."""
    found, todo = set[Node](), list(exchanges)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += [u for u in readers_of(node) if u in repeats]
    return dict.fromkeys(sorted(found))

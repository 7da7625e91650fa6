"""Rows that were sorted are put back by reading, not by adding them to zeros.

    order = argsort(experts)              [n], a permutation: every number below n once
    index_put(zeros [n, D], [order], rows, accumulate=True)       gradient of x[order]
    index_put(empty [n, D], [order], rows)
becomes
    rows[inverse]                         inverse[order[j]] = j

    index_put(zeros [T, D], [order // k], rows, accumulate=True)  sum of a token's k rows, and gradient of x[order // k]
    index_add(zeros [T, D], 0, order // k, rows)
    scatter_add(zeros [T, D], 0, (order // k)[:, None].expand(n, D), rows)
becomes
    rows[inverse].view(T, k, D).sum(1)

Models with experts sort rows in front of an all_to_all and behind it, forward and backward. The traced form writes the zeros,
then adds each element by an atomic operation, in any order. A read can be fused with what follows; sums are rounded once and
are the same in each run. A zero may have another sign.

Legend: T tokens, k experts of a token, n = T * k rows, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from ..graph.aten import CASTS, VIEWS, aten, c10d, dtype_of, prims, shape_of, storage_node, tensor_of, written_memory
from ..graph.emitter import Emitter
from ..graph.sizes import as_sizes, is_same, is_same_shape

_INDICES = {torch.int32, torch.int64}
_EMPTY = (aten.empty_like.default, aten.empty.memory_format, aten.new_empty.default)
_SORTS = (aten.sort.default, aten.sort.stable)
_FLOOR_DIVISIONS = (aten.floor_divide.default, aten.floor_divide.Scalar)
_ROUNDED_DIVISIONS = (aten.div.Tensor_mode, aten.div.Scalar_mode)
_COPIES = (aten.clone.default, aten.alias.default, aten.detach.default)
_ZEROS = (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)
_FILLED = (aten.full.default, aten.full_like.default, aten.new_full.default)


@dataclass(frozen=True)
class _PutBack:
    """Rows that a scatter puts where a permutation, divided by `repeats`, says. `may_repeat`: one row may stand for all."""

    order: Node
    repeats: int
    rows: Node
    may_repeat: bool


def may_gather_sorted_rows(graph: Graph) -> bool:
    """Return whether a joint graph exchanges rows, and puts rows at computed places."""
    exchanges = graph.find_nodes(op="call_function", target=c10d.all_to_all_single.default)
    return bool(exchanges) and any(graph.find_nodes(op="call_function", target=t) for t in _READERS)


def gather_sorted_rows(graph: Graph) -> int:
    """Change a joint graph in place. Return the number of scatters that are reads now."""
    inverses: dict[Node, Node] = {}
    written = written_memory(graph)
    found = [(node, m) for node in graph.nodes if node.target in _READERS and (m := _match(node, written))]
    replaced: dict[Node, Node] = {}
    for node, m in found:
        if m.order not in inverses:
            inverses[m.order] = _emit_inverse(graph, m.order)
        with graph.inserting_before(node):
            e = Emitter(graph, node, replaced)
            places = inverses[m.order]
            if m.may_repeat:
                places = e.call(aten.remainder.Scalar, places, e.call(aten.sym_size.int, m.rows, 0))
            result = e.contiguous(e.call(aten.index.Tensor, m.rows, [places]))
            if m.repeats > 1:
                tokens, *rest = shape_of(node)
                dims = [tokens if isinstance(tokens, int) else -1, m.repeats, *rest]
                result = e.call(aten.sum.dim_IntList, e.call(aten.reshape.default, result, dims), [1])
        node.replace_all_uses_with(result)
        replaced[node] = result
    for node, _ in reversed(found):
        target = node.args[0]
        graph.erase_node(node)
        if isinstance(target, Node) and not target.users and target.target in (*_ZEROS, *_FILLED, *_EMPTY):
            graph.erase_node(target)
    return len(found)


def _emit_inverse(graph: Graph, order: Node) -> Node:
    """Emit the inverse of a permutation, right behind it."""
    value = tensor_of(order)
    assert value is not None
    with graph.inserting_before(order.next):
        e = Emitter(graph, order, {})
        (rows,) = shape_of(order)
        count = rows if isinstance(rows, int) else e.call(aten.sym_size.int, order, 0)
        like = {"dtype": torch.int64, "device": value.device, "requires_grad": False}
        numbers = e.call(prims.iota.default, count, start=0, step=1, **like)
        return e.call(aten.scatter.src, numbers, 0, order, numbers)


def _match(node: Node, written: set[Node]) -> _PutBack | None:
    """Return what `node` scatters. None where a read would give something else. `written`: memory that the graph writes to."""
    read = _READERS[node.target](node)
    if read is None:
        return None
    target, index, rows, accumulates = read
    order, repeats = _divided_permutation(index)
    result, source = tensor_of(node), tensor_of(rows)
    if order is None or any({storage_node(n) for n in _chain(n, end)} & written for n, end in ((index, order), (target, None))):
        return None
    assert result is not None and source is not None
    shape, (count,) = as_sizes(result.shape), shape_of(order)
    is_whole = (
        result.dtype == source.dtype
        and result.is_contiguous()
        and is_same(shape[0] * repeats, count)
        and is_same_shape(as_sizes(source.shape)[1:], shape[1:])
        and all(isinstance(size, int) for size in shape[1:])
    )
    is_sum = accumulates and _is_zero(target) and (repeats == 1 or result.dtype.is_floating_point)
    may_read = is_sum or (not accumulates and repeats == 1)
    if not is_whole or not may_read or source.dim() == 0:
        return None
    have = as_sizes(source.shape)[0]
    if is_same(have, count):
        return _PutBack(order, repeats, rows, may_repeat=False)
    # A size that is not known is one that the program accepts: only an index_put takes one row for all.
    are_known = isinstance(have, int) and isinstance(count, int)
    return None if are_known else _PutBack(order, repeats, rows, node.target is aten.index_put.default)


_Read = tuple[Node, Node, Node, bool]


def _read_put(node: Node) -> _Read | None:
    """Return (target, index, rows, whether it adds) of an index_put by the first dim."""
    target, indices, rows, *rest = node.args
    accumulates = bool(rest[0] if rest else node.kwargs.get("accumulate", False))
    if not isinstance(target, Node) or not isinstance(rows, Node) or not isinstance(indices, (list, tuple)):
        return None
    index = indices[0] if len(indices) == 1 else None
    return (target, index, rows, accumulates) if isinstance(index, Node) else None


def _read_add(node: Node) -> _Read | None:
    """Return the same of an index_add by the first dim, without a factor."""
    target, dim, index, rows = node.args[:4]
    has_factor = len(node.args) > 4 or node.kwargs.get("alpha", 1) != 1
    nodes = all(isinstance(n, Node) for n in (target, index, rows))
    return (target, index, rows, True) if nodes and dim == 0 and not has_factor else None  # type: ignore[return-value]


def _read_scatter(node: Node) -> _Read | None:
    """Return the same of a scatter_add of whole rows: all elements of a row of its index are one number."""
    target, dim, index, rows = node.args[:4]
    if dim != 0 or not all(isinstance(n, Node) for n in (target, index, rows)):
        return None
    assert isinstance(index, Node) and isinstance(rows, Node)
    shape = shape_of(index)
    if index.target is not aten.expand.default or len(shape) != 2 or not is_same_shape(shape, shape_of(rows)):
        return None
    column = index.args[0]
    assert isinstance(column, Node)
    if not is_same_shape(shape_of(column), (shape[0], 1)):  # else the numbers may be those of columns
        return None
    return (target, column, rows, True)  # type: ignore[return-value]


def _divided_permutation(index: Node) -> tuple[Node | None, int]:
    """Return (order, k) of `order // k`, where order is a permutation. (None, 1) of another tensor."""
    node, repeats = _behind_views(index), 1
    divisor: Any = node.args[1] if len(node.args) > 1 else None
    rounds = node.target in _ROUNDED_DIVISIONS and node.kwargs.get("rounding_mode") in ("floor", "trunc")
    if (rounds or node.target in _FLOOR_DIVISIONS) and isinstance(divisor, int) and divisor > 0:
        node, repeats = _behind_copies(node.args[0]), divisor
    return (node, repeats) if _is_permutation(node) else (None, 1)


def _behind_views(node: Any) -> Node:
    """Return the tensor of one dim behind a column of the same numbers, or `node`."""
    while node.target in VIEWS and isinstance(node.args[0], Node) and _is_column(node):
        node = node.args[0]
    return _behind_copies(node)


def _is_column(node: Node) -> bool:
    shape = shape_of(node)
    return len(shape) == 2 and isinstance(shape[1], int) and shape[1] == 1


def _behind_copies(node: Any) -> Node:
    """Return the tensor that copies and casts between types of indices leave as it is."""
    while node.target in _COPIES or (node.target in CASTS and {dtype_of(node), dtype_of(node.args[0])} <= _INDICES):
        node = node.args[0]
    return node  # type: ignore[no-any-return]


def _chain(node: Node, end: Node | None) -> Iterator[Node]:
    """Yield `node` and the first inputs behind it up to `end`, or as long as they are copies."""
    yield node
    while node is not end and (end is not None or node.target in _COPIES):
        node = node.args[0]  # type: ignore[assignment]
        yield node


def _is_permutation(node: Node) -> bool:
    """Return whether `node` is the order in which a tensor of one dim was sorted."""
    value = tensor_of(node)
    sort = node.args[0] if node.args and node.args[1:] == (1,) else None
    return isinstance(sort, Node) and sort.target in _SORTS and value is not None and value.dim() == 1


def _is_zero(node: Node) -> bool:
    """Return whether all elements of `node` are zeros."""
    node = _behind_copies(node)
    if node.target in _FILLED:
        fill = node.args[2] if node.target is aten.new_full.default else node.args[1]
        return bool(not isinstance(fill, Node) and fill == 0)
    return node.target in _ZEROS


_READERS: dict[Any, Callable[[Node], _Read | None]] = {
    aten.index_put.default: _read_put,
    aten.index_add.default: _read_add,
    aten.scatter_add.default: _read_scatter,
}

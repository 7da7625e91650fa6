"""Sums of two reductions, as they stand and with other terms between.

    r1 + r2
    (x + r1) + r2                  becomes     x + (r1 + r2)              gradients of a residual
    (r1 + b1) + (r2 + b2)          becomes     (r1 + r2) + (b1 + b2)      parallel blocks with biases (Phi, GPT-NeoX)

x, r1, r2 and their sums have one type, shape and layout: a sum takes its layout from its operands, and later nodes rely on it.
b1 and b2 are vectors of the last dim; either may be absent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

from torch.fx import Graph, Node

from ...graph.aten import aten, dtype_of, shape_of, tensor_of
from ...graph.emitter import Emitter
from ...graph.joint_graph import copy_region
from ...graph.sizes import as_sizes, is_same, is_same_shape


@dataclass(frozen=True, slots=True)
class Sum:
    """`outer` = `other` + `first` + `second` + `vectors`. `inner`: sums below `outer`, which nothing else reads."""

    outer: Node
    first: Node
    second: Node
    other: Node | None = None
    vectors: tuple[Node, ...] = ()
    inner: tuple[Node, ...] = ()


@dataclass(frozen=True, slots=True)
class _Term:
    """A reduction, or its sum with a vector, or copies of that."""

    reduction: Node
    vectors: tuple[Node, ...] = ()
    inner: tuple[Node, ...] = ()


def find_sum(outer: Node, is_reduction: Callable[[Node], bool]) -> Sum | None:
    """Return the sum that ends in `outer`. `is_reduction`: whether a node is the result of one, which nothing else reads."""
    a, b = summands_of(outer) or (None, None)
    if a is None or b is None or a is b:
        return None
    first, second = _read_term(a, is_reduction), _read_term(b, is_reduction)
    if first and second:
        return _sum_of(outer, first, second)
    for inner, last in ((a, second), (b, first)):
        if last is None or len(inner.users) != 1:
            continue
        for other, term in _splits(inner):
            begins = _read_term(term, is_reduction)
            if begins and _read_term(other, is_reduction) is None:
                return _sum_of(outer, begins, last, other, inner)
    return None


def regroup(graph: Graph, found: Sum) -> list[Node]:
    """Add the reductions first. Return the nodes of the new sums, the sum of the reductions first."""
    if not found.inner:
        return [found.outer]
    e, new = Emitter(graph, found.outer, {}), list[Node]()

    def add(a: Node, b: Node) -> Node:
        new.append(e.call(aten.add.Tensor, a, b))
        return new[-1]

    with graph.inserting_before(found.outer):
        total = add(found.first, found.second)
        terms = [total, *([reduce(add, found.vectors)] if found.vectors else [])]
        if found.other is not None:
            terms = [found.other, reduce(add, terms)]
    copy_region(found.outer, new)
    found.outer.args = tuple(terms)
    for node in found.inner:
        graph.erase_node(node)
    return new


def _sum_of(outer: Node, first: _Term, second: _Term, other: Node | None = None, inner: Node | None = None) -> Sum | None:
    chain = (inner,) if inner is not None else ()
    found = Sum(
        outer, first.reduction, second.reduction, other, first.vectors + second.vectors, (*chain, *first.inner, *second.inner)
    )
    if not found.inner:
        return found
    tensors = [found.first, found.second, *found.inner, *([other] if other is not None else [])]
    return found if all(_is_alike(n, outer) for n in tensors) else None


def _read_term(node: Node, is_reduction: Callable[[Node], bool]) -> _Term | None:
    if is_reduction(node):
        return _Term(node)
    copies = list[Node]()
    while node.target is aten.clone.default and len(node.users) == 1:  # dropout that is not training
        copies.append(node)
        node = node.all_input_nodes[0]
    for vector, reduction in _splits(node) if len(node.users) == 1 else ():
        if is_reduction(reduction) and _is_vector(vector, node):
            return _Term(reduction, (vector,), (*copies, node))
    return None


def _splits(node: Node) -> list[tuple[Node, Node]]:
    """Return both orders of the two summands of a sum; [] for other nodes."""
    a, b = summands_of(node) or (None, None)
    return [] if a is None or b is None or a is b else [(a, b), (b, a)]


def summands_of(node: object) -> tuple[Node, Node] | None:
    """Return the two tensors whose sum `node` is; None for other nodes, and for a sum with a scaled tensor or a size."""
    if not isinstance(node, Node) or node.target is not aten.add.Tensor:
        return None
    if len(node.args) != 2 or node.kwargs.get("alpha", 1) != 1:
        return None
    a, b = node.args
    return (a, b) if _is_tensor(a) and _is_tensor(b) else None  # type: ignore[return-value]


def _is_tensor(value: object) -> bool:
    return isinstance(value, Node) and tensor_of(value) is not None


def _is_vector(node: Node, rows: Node) -> bool:
    """Return whether `node` is a vector of the columns of `rows`, in their type."""
    shape = shape_of(node)
    return len(shape) == 1 < len(shape_of(rows)) and is_same(shape[0], shape_of(rows)[-1]) and dtype_of(node) == dtype_of(rows)


def _is_alike(node: Node, other: Node) -> bool:
    """Return whether two tensors have one type, shape and layout."""
    a, b = node.meta["val"], other.meta["val"]
    same = dtype_of(node) == dtype_of(other) and is_same_shape(shape_of(node), shape_of(other))
    return same and is_same_shape(as_sizes(a.stride()), as_sizes(b.stride()))

"""Sums of reductions that begin with another tensor, as gradients of a residual do.

    (x + r1) + r2     becomes     x + (r1 + r2)     where r1 and r2 are reductions that can be merged

All have one type, shape and layout: a sum takes its layout from its operands, and later nodes rely on it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch.fx import Graph, Node

from ...graph.aten import aten, dtype_of, shape_of, tensor_of
from ...graph.emitter import Emitter
from ...graph.joint_graph import copy_region
from ...graph.sizes import as_sizes, is_same_shape


@dataclass(frozen=True, slots=True)
class SumChain:
    """`outer` = `inner` + `second`, and `inner` = `other` + `first`, which nothing else reads."""

    outer: Node
    inner: Node
    other: Node
    first: Node
    second: Node


def summands_of(node: object) -> tuple[Node, Node] | None:
    """Return the two tensors whose sum `node` is; None for other nodes, and for a sum with a scaled tensor or a size."""
    if not isinstance(node, Node) or node.target is not aten.add.Tensor:
        return None
    if len(node.args) != 2 or node.kwargs.get("alpha", 1) != 1:
        return None
    a, b = node.args
    return (a, b) if _is_tensor(a) and _is_tensor(b) else None  # type: ignore[return-value]


def find_chain(outer: Node, is_reduction: Callable[[Node], bool]) -> SumChain | None:
    """Return the chain that ends in `outer`. `is_reduction`: whether a node is the result of one, which nothing else reads."""
    for inner, second in _with_one_reduction(outer, is_reduction):
        for other, first in _with_one_reduction(inner, is_reduction) if len(inner.users) == 1 else ():
            if all(_is_alike(n, outer) for n in (inner, other, first, second)):
                return SumChain(outer, inner, other, first, second)
    return None


def regroup(graph: Graph, chain: SumChain) -> Node:
    """Add the reductions first. Return their sum."""
    e = Emitter(graph, chain.outer, {})
    with graph.inserting_before(chain.outer):
        total = e.call(aten.add.Tensor, chain.first, chain.second)
    copy_region(chain.outer, (total,))
    chain.outer.args = (chain.other, total)
    graph.erase_node(chain.inner)
    return total


def _with_one_reduction(node: Node, is_reduction: Callable[[Node], bool]) -> list[tuple[Node, Node]]:
    """Return [(other summand, reduction)] of a sum with one of them; [] for other nodes."""
    summands = summands_of(node)
    if summands is None or summands[0] is summands[1]:
        return []
    a, b = summands
    return [pair for pair, one in (((a, b), is_reduction(b)), ((b, a), is_reduction(a))) if one and not is_reduction(pair[0])]


def _is_tensor(value: object) -> bool:
    return isinstance(value, Node) and tensor_of(value) is not None


def _is_alike(node: Node, other: Node) -> bool:
    """Return whether two tensors have one type, shape and layout."""
    a, b = node.meta["val"], other.meta["val"]
    same = dtype_of(node) == dtype_of(other) and is_same_shape(shape_of(node), shape_of(other))
    return same and is_same_shape(as_sizes(a.stride()), as_sizes(b.stride()))

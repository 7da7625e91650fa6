"""Sums of reductions that begin with another tensor, as gradients of a residual do.

(x + r1) + r2     becomes     x + (r1 + r2)     where r1 and r2 are reductions that can be merged
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch.fx import Graph, Node

from ...graph.aten import aten, dtype_of, shape_of
from ...graph.emitter import Emitter
from ...graph.joint_graph import copy_region
from ...graph.sizes import is_same_shape


@dataclass(frozen=True, slots=True)
class SumChain:
    """`outer` = `inner` + `second`, and `inner` = `other` + `first`, which nothing else reads."""

    outer: Node
    inner: Node
    other: Node
    first: Node
    second: Node


def plain_summands(node: object) -> tuple[Node, Node] | None:
    """Return the two tensors that `node` adds; None for other nodes."""
    if not isinstance(node, Node) or node.target is not aten.add.Tensor:
        return None
    if len(node.args) != 2 or node.kwargs.get("alpha", 1) != 1:
        return None
    a, b = node.args
    return (a, b) if isinstance(a, Node) and isinstance(b, Node) else None


def find_chain(outer: Node, is_reduction: Callable[[Node], bool]) -> SumChain | None:
    """Return the chain that ends in `outer`. `is_reduction`: whether a node is the result of one, which nothing else reads."""
    for inner, second in _with_one_reduction(outer, is_reduction):
        same = dtype_of(inner) == dtype_of(outer) and is_same_shape(shape_of(inner), shape_of(outer))
        if same and len(inner.users) == 1:
            for other, first in _with_one_reduction(inner, is_reduction):
                if dtype_of(other) == dtype_of(inner) and is_same_shape(shape_of(other), shape_of(inner)):
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
    summands = plain_summands(node)
    if summands is None or summands[0] is summands[1]:
        return []
    a, b = summands
    return [pair for pair, one in (((a, b), is_reduction(b)), ((b, a), is_reduction(a))) if one and not is_reduction(pair[0])]

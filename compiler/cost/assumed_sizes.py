"""Values for sizes that are known at run time only, so that all ranks predict the same.

A mixture of experts reads the numbers of its tokens from the device: unbacked symbols. A rank traces nothing of their values,
and at run time they differ between ranks and steps. Predictions take them as balanced:

    all_to_all              each rank sends and receives equal parts of the rows that it has, and has as many rows afterwards
    split_with_sizes        equal parts
    nonzero                 masks of one shape have one nonzero for each element together, as masks of experts have

The rows of one side of an exchange are mostly known: tokens times experts per token. In a backward they follow from the shapes
of what is broadcast together. What is not known this way has no value, and its collective is not predicted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import sympy
import torch
from torch.fx import Graph, Node

from ub_overlap import _torch_compat as compat

from ..graph.aten import CASTS, aten, node_arg, shape_of, tensor_of
from ..graph.sizes import Size, as_size, evaluate_size
from ..match.all_to_all import split_args, split_sizes
from ..match.collectives import Op, read_collective

Hints = dict[sympy.Symbol, int]

_CUTS = (aten.split_with_sizes.default, aten.split_with_sizes_copy.default)


def assume_sizes(graph: Graph, hints: Hints) -> Hints:
    """Return `hints` with values for the sizes above. A size that has a hint keeps it."""
    exchanges = [
        c for n in graph.find_nodes(op="call_function", target=torch.ops._c10d_functional.all_to_all_single.default)
        if (c := read_collective(n)).op is Op.ALL_TO_ALL and c.ranks
    ]  # fmt: skip
    if not exchanges:
        return hints
    sizes = _Sizes(dict(hints), dict(_equal_sizes(graph)))
    for _ in range(2):  # the rows of an exchange may be known from a later one
        for c in exchanges:
            output_splits, input_splits = map(split_sizes, split_args(c))
            before, after = sizes.value(shape_of(c.input)[0]), sizes.value(shape_of(c.node)[0])
            sizes.assume_parts(input_splits, before if before is not None else after)
            sizes.assume_parts(output_splits, after if after is not None else before)
    for node in graph.nodes:
        if node.target in _CUTS:
            _assume_cut(sizes, node)
    _assume_nonzeros(sizes, graph.find_nodes(op="call_function", target=aten.nonzero.default))
    return sizes.hints


class _Sizes:
    """Known sizes. `equal`: expressions that equal a constant."""

    def __init__(self, hints: Hints, equal: dict[Size, int]) -> None:
        self.hints, self.equal = hints, equal

    def value(self, size: Size) -> int | None:
        known = evaluate_size(size, self.hints)
        return self.equal.get(size) if known is None else known

    def assume_parts(self, sizes: Sequence[Size], total: int | None) -> None:
        """Take unknown `sizes` as equal parts of `total`."""
        if total is None:
            return
        for i, size in enumerate(sizes):
            if isinstance(size, sympy.Symbol):
                part = total * (i + 1) // len(sizes) - total * i // len(sizes)
                self.hints.setdefault(size, part)


def _assume_cut(sizes: _Sizes, cut: Node) -> None:
    dim = cut.args[2] if len(cut.args) > 2 else cut.kwargs.get("dim", 0)
    assert isinstance(dim, int)
    parts = [as_size(s.meta["val"]) if isinstance(s, Node) else s for s in cut.args[1]]  # type: ignore[union-attr]
    sizes.assume_parts(parts, sizes.value(shape_of(node_arg(cut))[dim]))


def _assume_nonzeros(sizes: _Sizes, nodes: Sequence[Node]) -> None:
    masks = Counter(shape_of(node_arg(n)) for n in nodes)
    for node in nodes:
        shape = shape_of(node_arg(node))
        elements = 1
        for size in shape:
            known = sizes.value(size)
            if known is None:
                break
            elements *= known
        else:
            rows = shape_of(node)[0]
            if isinstance(rows, sympy.Symbol):
                sizes.hints.setdefault(rows, max(1, elements // masks[shape]))


def _equal_sizes(graph: Graph) -> Iterator[tuple[Size, int]]:
    """Yield (expression, constant) pairs that are equal in every run: asserted, or broadcast together."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.SymBool) and isinstance(relation := value.node.expr, sympy.Eq):
            if any(u.target is aten._assert_scalar.default for u in node.users):
                yield from _pair(relation.lhs, relation.rhs)
        elif node.op == "call_function" and tensor_of(node) is not None:
            yield from _broadcast_sizes(node)


def _broadcast_sizes(node: Node) -> Iterator[tuple[Size, int]]:
    if node.target is aten.index_put.default:
        indices = [i for i in node.args[1] if isinstance(i, Node)]  # type: ignore[union-attr]
        tensors = [*indices, node_arg(node, 2)]
        if len(indices) != 1 or not shape_of(tensors[1]):
            return
        shapes = [shape_of(t)[:1] for t in tensors]
    elif node.target is aten.expand.default or node.target in CASTS or _is_pointwise(node):
        shapes = [shape_of(n) for n in (node, *node.all_input_nodes) if tensor_of(n) is not None]
    else:
        return
    dims = max(map(len, shapes))
    if any(len(shape) != dims for shape in shapes):
        return
    for sizes in zip(*shapes, strict=True):
        constant = next((s for s in sizes if isinstance(s, int) and s > 1), None)
        if constant is not None:
            yield from ((s, constant) for s in sizes if not isinstance(s, int))


def _is_pointwise(node: Node) -> bool:
    return isinstance(node.target, compat.OpOverload) and torch.Tag.pointwise in node.target.tags


def _pair(a: Size, b: Size) -> Iterator[tuple[Size, int]]:
    for size, constant in ((a, b), (b, a)):
        if getattr(constant, "is_Integer", False) and not getattr(size, "is_Integer", False):
            yield size, int(constant)

"""Values for sizes that are known at run time only, so that all ranks predict the same.

A mixture of experts reads the numbers of its tokens from the device: unbacked symbols. A rank traces nothing of their values,
and at run time they differ between ranks and steps. Predictions take them as balanced:

    all_to_all              each rank sends and receives equal parts of the rows that it has, and has as many rows afterwards
    split_with_sizes        equal parts
    nonzero                 masks of one tensor have one nonzero for each element together, as masks of experts have

The rows of one side of an exchange are mostly known: tokens times experts per token. In a backward they follow from the shapes
of what is broadcast together, and the number of tokens may be dynamic. What is not known this way has no value, and its
collective is not predicted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import permutations

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
    sizes = _Sizes(dict(hints), _equal_sizes(graph))
    cuts = [n for n in graph.nodes if n.target in _CUTS]
    nonzeros = graph.find_nodes(op="call_function", target=aten.nonzero.default)
    for _ in range(2):  # rows may be known from a later exchange, or from masks
        for c in exchanges:
            output_splits, input_splits = map(split_sizes, split_args(c))
            before, after = sizes.value(shape_of(c.input)[0]), sizes.value(shape_of(c.node)[0])
            sizes.assume_parts(input_splits, before if before is not None else after)
            sizes.assume_parts(output_splits, after if after is not None else before)
        for cut in cuts:
            _assume_cut(sizes, cut)
        _assume_nonzeros(sizes, nonzeros)
    return sizes.hints


class _Sizes:
    """Known sizes. `equal`: by expression, the sizes that have its value in every run."""

    def __init__(self, hints: Hints, equal: Iterable[tuple[Size, Size]]) -> None:
        self.hints = hints
        self.equal: dict[Size, list[Size]] = {}
        for size, other in equal:
            self.equal.setdefault(size, []).append(other)

    def value(self, size: Size) -> int | None:
        forms = (size, *self.equal.get(size, ()))
        return next((known for form in forms if (known := evaluate_size(form, self.hints)) is not None), None)

    def assume_parts(self, sizes: Sequence[Size], total: int | None) -> None:
        """Take unknown `sizes` as equal parts of what the known ones leave of `total`."""
        if total is None:
            return
        values = [self.value(size) for size in sizes]
        unknown = values.count(None)
        left, number = max(0, total - sum(v for v in values if v is not None)), 0
        for size, value in zip(sizes, values, strict=True):
            if value is None:
                value = left * (number + 1) // unknown - left * number // unknown
                number += 1
            if isinstance(size, sympy.Symbol):
                self.hints.setdefault(size, value)


def _assume_cut(sizes: _Sizes, cut: Node) -> None:
    dim = cut.args[2] if len(cut.args) > 2 else cut.kwargs.get("dim", 0)
    assert isinstance(dim, int)
    parts = [as_size(s.meta["val"]) if isinstance(s, Node) else s for s in cut.args[1]]  # type: ignore[union-attr]
    sizes.assume_parts(parts, sizes.value(shape_of(node_arg(cut))[dim]))


def _assume_nonzeros(sizes: _Sizes, nodes: Sequence[Node]) -> None:
    families = {n: _mask_family(node_arg(n)) for n in nodes}
    members = Counter(families.values())
    for node in nodes:
        rows, elements = shape_of(node)[0], 1
        for size in shape_of(node_arg(node)):
            known = sizes.value(size)
            if known is None:
                break
            elements *= known
        else:
            if isinstance(rows, sympy.Symbol):
                sizes.hints.setdefault(rows, max(1, elements // members[families[node]]))


def _mask_family(mask: Node) -> tuple[Node, tuple[Size, ...]]:
    """Return what masks have in common that share their nonzeros: the tensor of which all are made, and their shape.

    Masks of experts are parts of one tensor, or compare one tensor with the numbers of experts. Other layers have others.
    """
    shape, node = shape_of(mask), mask
    while tensors := [n for n in node.all_input_nodes if tensor_of(n) is not None]:
        source = tensors[0] if len(tensors) == 1 else next((t for t in tensors if shape_of(t) == shape), None)
        if source is None:
            break
        node = source
        if len(node.users) > 1:
            break
    return node, shape


def _equal_sizes(graph: Graph) -> Iterator[tuple[Size, Size]]:
    """Yield (expression, size) pairs that are equal in every run: asserted, or broadcast together."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.SymBool) and isinstance(relation := value.node.expr, sympy.Eq):
            if any(u.target is aten._assert_scalar.default for u in node.users):
                yield from _pairs([relation.lhs, relation.rhs])
        elif node.op == "call_function" and tensor_of(node) is not None:
            yield from _broadcast_sizes(node)


def _broadcast_sizes(node: Node) -> Iterator[tuple[Size, Size]]:
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
        yield from _pairs([s for s in dict.fromkeys(sizes) if s != 1])  # what is 1 is broadcast


def _pairs(sizes: Sequence[Size]) -> Iterator[tuple[Size, Size]]:
    """Yield (expression, other size) for different sizes that are equal."""
    for size, other in permutations(sizes, 2):
        if not getattr(size, "is_Integer", isinstance(size, int)):
            yield size, other


def _is_pointwise(node: Node) -> bool:
    return isinstance(node.target, compat.OpOverload) and torch.Tag.pointwise in node.target.tags

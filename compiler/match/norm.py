"""RMSNorm and LayerNorm over the last dim, as models and Inductor's decompositions spell them.

rms     x * rsqrt(mean(x ** 2) + eps)                         in fp32
layer   (x - mean(x)) * rsqrt(var(x) + eps)                   in fp32
tail    [round to x's type] [* weight] [+ bias] [round]       or one op: _fused_rms_norm, native_layer_norm
weight  w, or constant + w                                    in fp32 (Gemma's 1 + w)
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import Node

from ..graph.aten import CASTS, aten, dtype_of, readers, shape_of, tensor_of
from ..graph.sizes import is_same

_ONE_OP = {"aten._fused_rms_norm.default": ("rms", 1), "aten.native_layer_norm.default": ("layer", 1)}
_ADDS = (aten.add.Tensor, aten.add.Scalar)
_SQUARES = (aten.pow.Tensor_Scalar,)


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm of a tensor's last dim. `out`: the node with its result, in the type of the tensor. `nodes`: all of its nodes."""

    kind: str
    """ "rms" or "layer"."""
    weight: Node | None
    bias: Node | None
    epsilon: float
    round_before_weight: bool
    out: Node
    nodes: tuple[Node, ...]
    weight_offset: float = 0.0
    """Added to the weight, in fp32."""


def find_norm(x: Node, wide: Node | None = None) -> Norm | None:
    """Return the norm of `x` whose inner values nothing else reads, if there is one and only one.

    `wide`: an fp32 value of x's sizes that is normed instead of `x`, and whose norm is rounded to x's type.
    """
    norms = (*_one_op(x), *_spelled_out(x)) if wide is None else _of_wide(x, wide, ())
    found = [norm for norm in norms if _is_closed(norm, x)]
    return found[0] if len(found) == 1 else None


def _is_closed(norm: Norm, x: Node) -> bool:
    """Return whether nothing else reads an inner value, and the result has the sizes and type of `x`."""
    inside = {*norm.nodes}
    closed = all(reader in inside for node in norm.nodes if node is not norm.out for reader in readers(node))
    return closed and dtype_of(norm.out) == dtype_of(x)


def _one_op(x: Node) -> Iterator[Norm]:
    for node in readers(x):
        if str(node.target) not in _ONE_OP or node.args[0] is not x:
            continue
        kind, dims = _ONE_OP[str(node.target)][0], node.args[1]
        operands = [*node.args[2:4], None, None] if kind == "layer" else [node.args[2] if len(node.args) > 2 else None, None]
        weight, bias = operands[0], operands[1]
        epsilon = node.args[4] if kind == "layer" else node.args[3] if len(node.args) > 3 else None
        parts = readers(node)
        results = [p for p in parts if p.target is operator.getitem and p.args[1] == 0]
        unread = all(p in results or not readers(p) for p in parts)
        is_known = isinstance(epsilon, float | int)  # torch's default for RMSNorm depends on its release
        if len(dims) != 1 or len(results) != 1 or not (unread and is_known and fits_columns(x, weight, bias)):  # type: ignore[arg-type]
            continue
        yield Norm(kind, _as_node(weight), _as_node(bias), float(epsilon), False, results[0], (node, *parts))


def _spelled_out(x: Node) -> Iterator[Norm]:
    is_wide = dtype_of(x) is torch.float32
    wides = [x] if is_wide else [n for n in readers(x) if n.target in CASTS and dtype_of(n) is torch.float32]
    for wide in wides:
        yield from _of_wide(x, wide, () if is_wide else (wide,))


def _of_wide(x: Node, wide: Node, lead: tuple[Node, ...]) -> Iterator[Norm]:
    """Yield norms of the fp32 value `wide`, with the type of `x`. `lead`: nodes in front that belong to the norm."""
    for factor in {r: None for n in readers(wide) for r in _inputs(n) if r.target is aten.rsqrt.default}:
        yield from _rms(x, wide, factor, lead)
    for centered in (n for n in readers(wide) if n.target is aten.sub.Tensor and n.args[0] is wide and not n.kwargs):
        yield from _layer(x, wide, centered, lead)
    for mean in (n for n in readers(wide) if _is_mean(n, x)):
        yield from _spelled_layer(x, wide, mean, lead)


def _rms(x: Node, wide: Node, factor: Node, lead: tuple[Node, ...]) -> Iterator[Norm]:
    total = _inputs(factor)[0]
    mean, epsilon = _plus_constant(total)
    if mean is None or not _is_mean(mean, x) or not _is_square(square := _inputs(mean)[0], wide):
        return
    if (product := _product(wide, factor)) is not None:
        yield from _tail("rms", x, product, epsilon, (*lead, square, mean, total, factor, product))


def _layer(x: Node, wide: Node, centered: Node, lead: tuple[Node, ...]) -> Iterator[Norm]:
    """Yield the norm with torch's op for mean and variance."""
    mean = centered.args[1]
    if not isinstance(mean, Node) or mean.target is not operator.getitem or mean.args[1] != 1:
        return
    both = _inputs(mean)[0]
    is_plain = both.target is aten.var_mean.correction and both.args[0] is wide and _is_last_dim(both, x)
    if not is_plain or both.kwargs.get("correction") != 0 or both.kwargs.get("keepdim") is not True:
        return
    for variance in (n for n in readers(both) if n.target is operator.getitem and n.args[1] == 0):
        for total, factor, epsilon in _factors(variance):
            if (product := _product(centered, factor)) is not None:
                inner = (both, variance, mean, total, factor, centered, product)
                yield from _tail("layer", x, product, epsilon, (*lead, *inner))


def _spelled_layer(x: Node, wide: Node, mean: Node, lead: tuple[Node, ...]) -> Iterator[Norm]:
    """Yield the norm with mean and variance spelled out. The centered values may be computed twice, as Cohere's are."""
    centered = [n for n in readers(mean) if n.target is aten.sub.Tensor and n.args == (wide, mean) and not n.kwargs]
    squares = [square for c in centered for square in readers(c) if _is_square(square, c)]
    for variance in (n for square in squares for n in readers(square) if _is_mean(n, x)):
        for total, factor, epsilon in _factors(variance):
            for product in filter(None, (_product(c, factor) for c in centered)):
                inner = (mean, *centered, *squares, variance, total, factor, product)
                yield from _tail("layer", x, product, epsilon, (*lead, *inner))


def _factors(variance: Node) -> Iterator[tuple[Node, Node, float]]:
    """Yield (variance + epsilon, its rsqrt, epsilon)."""
    for total in readers(variance):
        source, epsilon = _plus_constant(total)
        if source is variance:
            yield from ((total, n, epsilon) for n in readers(total) if n.target is aten.rsqrt.default)


def _product(values: Node, factor: Node) -> Node | None:
    return next((n for n in readers(values) if n.target is aten.mul.Tensor and {*n.args} == {values, factor}), None)


def _is_mean(node: Node, x: Node) -> bool:
    return node.target is aten.mean.dim and _is_last_dim(node, x) and dtype_of(node) is torch.float32


def _is_square(node: Node, values: Node) -> bool:
    is_power = node.target in _SQUARES and node.args == (values, 2)
    return is_power or (node.target is aten.mul.Tensor and node.args == (values, values))


def _tail(kind: str, x: Node, product: Node, epsilon: float, nodes: tuple[Node, ...]) -> Iterator[Norm]:
    """Follow the product with the weight, the sum with the bias, and the cast back."""
    dtype = dtype_of(x)
    weight: Node | None = None
    bias: Node | None = None
    offset = 0.0
    rounds, at, taken = False, product, [*nodes]
    while len(following := readers(at)) == 1:
        (node,) = following
        if node.target in CASTS and dtype_of(node) == dtype and dtype_of(at) != dtype:
            rounds = rounds or weight is None
        elif weight is None and bias is None and node.target is aten.mul.Tensor and (vectors := _vectors(node, at, x)):
            weight, offset = vectors[0]
            taken += _vector_nodes(node, at, weight)
        elif bias is None and node.target is aten.add.Tensor and not node.kwargs and (vectors := _vectors(node, at, x)):
            added, constant = vectors[-1]
            if dtype_of(at) is not torch.float32 or constant:  # a sum in the narrow type rounds twice
                break
            bias = added
            taken += _vector_nodes(node, at, bias)
        else:
            break
        taken.append(node)
        at = node
    rounds = rounds and weight is not None and dtype is not torch.float32
    yield Norm(kind, weight, bias, epsilon, rounds, at, tuple(dict.fromkeys(taken)), offset)


def _vectors(node: Node, at: Node, x: Node) -> list[tuple[Node, float]]:
    """Return the vectors [cols] of x's type that `node` combines with `at`, each with the constant that is added to it in fp32.

    A sum of a vector and a constant comes first, the sum as a vector of its own last.
    """
    others = [n for n in _inputs(node) if n is not at]
    if len(others) != 1 or len(node.args) != 2:
        return []
    pairs = [(others[0], 0.0)]
    vector, constant = _plus_constant(others[0])
    if vector is not None and dtype_of(others[0]) is torch.float32:
        pairs.insert(0, (vector, constant))
    narrow = [(_inputs(v)[0] if _is_widening(v) else v, constant) for v, constant in pairs]
    return [(v, constant) for v, constant in narrow if fits_columns(x, v)]


def _is_widening(node: Node) -> bool:
    return node.target in CASTS and len(_inputs(node)) == 1 and dtype_of(node) is torch.float32


def _vector_nodes(node: Node, at: Node, vector: Node) -> list[Node]:
    """Return what only widens `vector` and adds a constant to it, for `node`."""
    taken, todo = list[Node](), [n for n in _inputs(node) if n is not at]
    while todo:
        n = todo.pop()
        if n is not vector and len(readers(n)) == 1:
            taken.append(n)
            todo += _inputs(n)
    return taken


def fits_columns(x: Node, *vectors: object) -> bool:
    """Return whether all are None, or vectors of x's columns and type."""
    for v in vectors:
        if v is None:
            continue
        if not isinstance(v, Node) or tensor_of(v) is None or dtype_of(v) != dtype_of(x):
            return False
        if len(shape_of(v)) != 1 or not is_same(shape_of(v)[0], shape_of(x)[-1]):
            return False
    return True


def _as_node(value: object) -> Node | None:
    return value if isinstance(value, Node) else None


def _inputs(node: Node) -> list[Node]:
    return [a for a in node.args if isinstance(a, Node)]


def _plus_constant(node: Node) -> tuple[Node | None, float]:
    """Return (tensor, constant) of their sum, (None, 0) for another node."""
    if node.target not in _ADDS or len(node.args) != 2 or node.kwargs:
        return None, 0.0
    tensor, constant = node.args
    good = isinstance(tensor, Node) and isinstance(constant, float | int)
    return (tensor, float(constant)) if good else (None, 0.0)  # type: ignore[return-value,arg-type]


def _is_last_dim(node: Node, x: Node) -> bool:
    """Return whether a reduction keeps the dims of `x` and reduces the last one."""
    dims = node.args[1] if len(node.args) > 1 else None
    keeps = node.kwargs.get("keepdim", node.args[2] if len(node.args) > 2 else False)
    return isinstance(dims, list | tuple) and [d % len(shape_of(x)) for d in dims] == [len(shape_of(x)) - 1] and bool(keeps)  # type: ignore[operator]

"""A cast to float8 behind a norm, by a scale that is known before, or by scales of its rows.

    x -> [cast to fp32] -> * 1 / scale, or / scale -> clamp to -F .. F -> cast to float8          F: the format's largest value
    x -> abs -> amax of rows -> * factor, or / number -> clamp_min -> the rows' scales

A scale that is computed from the amax of all rows does not qualify: blocks of rows would have to wait for each other.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import Node

from ub_overlap.runtime.fp8.numerics import FLOAT8

from ..graph.aten import CASTS, DIVISIONS, Effect, aten, dtype_of, element_effect, readers, shape_of, tensor_of
from ..graph.sizes import is_same, is_same_shape, numel

_CLAMPS = (aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default)
_PRODUCTS = (aten.mul.Tensor, aten.mul.Scalar)


@dataclass(frozen=True, slots=True)
class Float8Cast:
    """A cast of rows to float8. `scale`: of the tensor; None where each row has its own."""

    scale: Node | None
    row_scales: Node | None
    """The node with the rows' scales, max(amax * amax_factor, least_scale). It may have any readers."""
    amax_factor: float
    least_scale: float
    divides: bool
    """Whether rows are divided by their scale, not multiplied by its reciprocal."""
    out: Node
    """The node with the float8 numbers."""
    nodes: tuple[Node, ...]


def find_float8_cast(x: Node) -> Float8Cast | str:
    """Return the cast that alone reads `x`, or why a cast that reads it does not qualify; "" where none does."""
    found = [cast for wide, scaled in _scaled(x) if (cast := _read_cast(x, wide, scaled)) is not None]
    if not found:
        return ""
    reasons = [_why_not(x, cast) for cast in found]
    return found[0] if len(found) == 1 and not reasons[0] else next(filter(None, reasons), "there are several casts")


def _scaled(x: Node) -> Iterator[tuple[tuple[Node, ...], Node]]:
    """Yield products and quotients of `x` in fp32, each with the casts in front."""
    wides = [n for n in readers(x) if n.target in CASTS and dtype_of(n) is torch.float32]
    for lead, source in [((), x), *(((wide,), wide) for wide in wides)]:
        for node in readers(source):
            is_product = node.target is aten.mul.Tensor or (node.target is aten.div.Tensor and node.args[0] is source)
            if is_product and len(node.all_input_nodes) == 2 and dtype_of(node) is torch.float32 and not node.kwargs:
                yield lead, node


def _read_cast(x: Node, lead: tuple[Node, ...], scaled: Node) -> Float8Cast | None:
    """Return the cast of `scaled`, `x` by its scale; None where it is none."""
    low = high = None
    at, nodes = scaled, [*lead, scaled]
    while len(following := readers(at)) == 1 and (node := following[0]).target in _CLAMPS:
        least, most = _bounds(node)
        low, high = least if low is None else low, most if high is None else high
        at = node
        nodes.append(node)
    out = next((n for n in following if n.target in CASTS and tensor_of(n) is not None and dtype_of(n) in FLOAT8), None)
    if out is None or len(following) != 1:
        return None
    limit = torch.finfo(dtype_of(out)).max
    if (low, high) != (-limit, limit) or not is_same_shape(shape_of(out), shape_of(x)):
        return None
    source = lead[-1] if lead else x
    other = next(n for n in scaled.all_input_nodes if n is not source)
    scale, between = _behind_views(other)
    divides = scaled.target is aten.div.Tensor
    if not divides:
        if scale.target is not aten.reciprocal.default:
            return None
        between.append(scale)
        scale, views = _behind_views(scale.all_input_nodes[0])
        between += views
    if dtype_of(scale) is not torch.float32:
        return None
    rows = _row_scales(x, scale)
    if rows is not None and is_same_shape(shape_of(other), (*shape_of(x)[:-1], 1)):
        factor, least_scale, inner = rows
        return Float8Cast(None, scale, factor, least_scale, divides, out, (*inner, scale, *between, *nodes, out))
    if not is_same(numel(shape_of(scale)), 1):
        return None
    return Float8Cast(scale, None, 0.0, 0.0, divides, out, (*nodes, out))


def _why_not(x: Node, cast: Float8Cast) -> str:
    """Return why a cast does not qualify, "" if it does: `x` or an inner value has another reader."""
    inside = set(cast.nodes)
    inner = [n for n in cast.nodes if n is not cast.out and n is not cast.row_scales]
    if all(reader in inside for node in (x, *inner) for reader in readers(node)):
        return ""
    if cast.scale is not None and _needs(cast.scale, x):
        return "its scale is computed from all rows of the norm"
    return "the norm's result has other readers"


def _needs(node: Node, x: Node) -> bool:
    """Return whether `node` is computed from `x`, which is before it in the graph."""
    todo, seen = [node], set[Node]()
    while todo:
        for source in todo.pop().all_input_nodes:
            if source is x:
                return True
            if source not in seen and x < source:
                seen.add(source)
                todo.append(source)
    return False


def _row_scales(x: Node, scale: Node) -> tuple[float, float, list[Node]] | None:
    """Return (amax_factor, least_scale, the nodes in front) of scales of x's rows; None for others."""
    least, most = _bounds(scale) if scale.target in _CLAMPS else (None, None)
    if least is None or least <= 0 or most is not None:
        return None
    product, inner = _behind_views(scale.all_input_nodes[0])
    factor = _constant_factor(product)
    if factor is None or factor <= 0:
        return None
    inner.append(product)
    amax, views = _behind_views(product.all_input_nodes[0], casts=True)
    inner += [*views, amax]
    if amax.target is operator.getitem and amax.args[1] == 0:
        amax = amax.all_input_nodes[0]
        inner.append(amax)
        is_of_rows = amax.target is aten.max.dim and _is_last(amax.args[1], x)
    else:
        dims = amax.args[1] if amax.target is aten.amax.default and len(amax.args) > 1 else None
        is_of_rows = isinstance(dims, list | tuple) and len(dims) == 1 and _is_last(dims[0], x)
    absolute = amax.all_input_nodes[0] if is_of_rows else None
    if absolute is None or absolute.target is not aten.abs.default:
        return None
    inner.append(absolute)
    source = absolute.all_input_nodes[0]
    if source is not x:
        if source.target not in CASTS or source.all_input_nodes[0] is not x or dtype_of(source) is not torch.float32:
            return None
        inner.append(source)
    return factor, least, list(dict.fromkeys(inner))


def _behind_views(node: Node, casts: bool = False) -> tuple[Node, list[Node]]:
    """Return what `node` is a view of, with `casts` also through casts to fp32, and the views."""
    views: list[Node] = []
    while (effect := element_effect(node)) is not None:
        widens = casts and effect.kind is Effect.CAST and dtype_of(node) is torch.float32
        if effect.kind is not Effect.SAME and not widens:
            break
        views.append(node)
        node = effect.source
    return node, views


def _bounds(clamp: Node) -> tuple[float | None, float | None]:
    """Return the lower and the upper bound of a clamp, None where it has none."""
    values = [*clamp.args[1:], *clamp.kwargs.values()]
    if clamp.target is aten.clamp.default:
        values = [clamp.args[i] if len(clamp.args) > i else clamp.kwargs.get(name) for i, name in ((1, "min"), (2, "max"))]
    bounds = [float(v) if isinstance(v, int | float) else None for v in values]
    if clamp.target is aten.clamp_min.default:
        return bounds[0], None
    return (None, bounds[0]) if clamp.target is aten.clamp_max.default else (bounds[0], bounds[1])


def _constant_factor(node: Node) -> float | None:
    """Return the constant that `node` multiplies its one input with; None for other nodes."""
    if (node.target not in _PRODUCTS and node.target not in DIVISIONS) or len(node.args) != 2 or node.kwargs:
        return None
    constant = node.args[1]
    if not isinstance(constant, int | float) or not isinstance(node.args[0], Node):
        return None
    if node.target in DIVISIONS:
        return 1.0 / constant if constant else None
    return float(constant)


def _is_last(dim: object, x: Node) -> bool:
    return isinstance(dim, int) and dim % len(shape_of(x)) == len(shape_of(x)) - 1

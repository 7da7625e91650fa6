"""Quantize values where their elements come from, and repeat the steps from there on the quantized elements.

    x -> all_gather -> wait -> view -> mm          x -> quantize -> all_gather -> wait -> view -> _scaled_mm
                                         becomes        scale --(per tensor: shared by all ranks; per row: gathered)--^

`QuantizedValues.get` walks back from an operand and repeats every step on the quantized elements. Each step is repeated once
and shared: by q, k and v, and by the weight gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch.fx import Graph, Node

from ..graph.aten import (
    CASTS,
    Effect,
    aten,
    c10d,
    dim_of,
    dtype_of,
    element_effect,
    match_regroup,
    node_arg,
    pieces_of,
    shape_of,
)
from ..graph.emitter import Emitter
from ..graph.sizes import is_same
from .cast_nodes import emit_contiguous_copy, emit_dequantize, emit_transposed_copy, view_as_bytes, view_as_format
from .provenance import Axis, element_source, step_to_source


@dataclass(frozen=True, slots=True)
class QuantizedValue:
    """`q`: the elements in float8, in the value's shape. `scale`: [], or that shape with one dim of size 1."""

    q: Node
    scale: Node


Quantize = Callable[[Emitter, Node, Axis, tuple[str, ...], Node | None], QuantizedValue]
"""(emitter, value, axis, groups, after) -> the quantized value.

`groups`: the process groups whose ranks share the scale. `after`: a node of backward that the cast must follow, or None.
"""

EmitTransposed = Callable[[Emitter, Node], Node]
"""(emitter, float8 [r, c]) -> a contiguous copy [c, r]."""


class QuantizedValues:
    """The quantized values of one graph.

    `float8_gathers`: the all_gathers that carry float8 only. `quantize`: how a value is cast at its origin. `inputs`: the graph
    inputs that sizes may be read from. `is_cast_per_reader`: whether readers do not share the casts of a value. `stop_at`:
    values that are cast as they are, wherever their elements come from. `emit_transposed`: how a cast is copied to a transposed
    layout.
    """

    def __init__(
        self,
        graph: Graph,
        float8_gathers: set[Node],
        quantize: Quantize,
        inputs: Sequence[Node],
        is_cast_per_reader: Callable[[Node], bool] = lambda node: False,
        stop_at: Container[Node] = (),
        emit_transposed: EmitTransposed = emit_transposed_copy,
    ) -> None:
        self.graph, self._quantize, self._inputs, self._stop_at = graph, quantize, inputs, stop_at
        self.float8_gathers, self.is_cast_per_reader = float8_gathers, is_cast_per_reader
        self._emit_transposed = emit_transposed
        self.reader: Node
        """The node that values are quantized for: new nodes are inserted before it."""
        self.replaced: set[Node] = set()
        """Nodes whose work is repeated on quantized elements."""
        self._values: dict[tuple[Node, Axis, tuple[str, ...], Node | None], QuantizedValue] = {}
        self._copies: dict[tuple[Node, str], Node] = {}
        self._dequantized: dict[Node, Node] = {}

    def get(self, node: Node, axis: Axis, groups: tuple[str, ...] = (), after: Node | None = None) -> QuantizedValue:
        """Return the quantized `node`. Emit it on the first request; `after` applies to that one."""
        key = (node, axis, groups, self.reader if self.is_cast_per_reader(node) else None)
        if key not in self._values:
            self._values[key] = self._emit(node, axis, groups, after)
        return self._values[key]

    def has(self, node: Node, axis: Axis) -> bool:
        """Return whether the elements of `node`, or of a value that it is a view of, are quantized already."""
        quantized = {(n, a) for n, a, *_ in self._values}
        step: tuple[Node, Axis] | None = (node, axis)
        while step is not None:
            if step in quantized:
                return True
            step = step_to_source(*step) if self._is_repeated(step[0]) else None
        return False

    def is_gathered_in_float8(self, node: Node) -> bool:
        """Return whether the elements of `node` come from a gather that carries float8."""
        previous: Node | None = node
        while previous is not None:
            if previous in self.float8_gathers:
                return True
            previous = element_source(previous)
        return False

    def dequantize(self, node: Node, axis: Axis) -> Node:
        """Return the dequantized value of `node` in its own dtype."""
        if node not in self._dequantized:
            value = self.get(node, axis)
            with self.emitter(node) as e:
                self._dequantized[node] = emit_dequantize(e, value.q, value.scale, dtype_of(node))
        return self._dequantized[node]

    def lay_out(self, q: Node, row_major: bool) -> Node:
        """Return the 2D float8 `q` in row-major or column-major layout: the hardware multiplies no other."""
        strides = q.meta["val"].stride()
        if strides[1 if row_major else 0] == 1 and strides[0 if row_major else 1] != 1:
            return q
        if row_major:
            is_permuted = q.target in (aten.t.default, aten.permute.default, aten.transpose.int)
            base = node_arg(q) if is_permuted else q
            is_transposed = base.meta["val"].dim() == 2 and base.meta["val"].stride() == strides[::-1] != strides
            return self._transposed_copy(base) if is_transposed else self._contiguous_copy(q)
        copy = self._transposed_copy(q)
        with self.emitter(copy) as e:
            return e.transpose(copy)

    def _transposed_copy(self, base: Node) -> Node:
        if (base, "transposed") not in self._copies:
            with self.emitter(base) as e:
                self._copies[base, "transposed"] = self._emit_transposed(e, base)
        return self._copies[base, "transposed"]

    def _contiguous_copy(self, q: Node) -> Node:
        if (q, "contiguous") not in self._copies:
            with self.emitter(q) as e:
                self._copies[q, "contiguous"] = emit_contiguous_copy(e, q)
        return self._copies[q, "contiguous"]

    @contextmanager
    def emitter(self, traced_as: Node) -> Iterator[Emitter]:
        """Emit before the current reader: its inputs exist there, or were emitted for an earlier reader."""
        with self.graph.inserting_before(self.reader):
            yield Emitter(self.graph, traced_as, {}, inputs=self._inputs)

    def _emit(self, node: Node, axis: Axis, groups: tuple[str, ...], after: Node | None) -> QuantizedValue:
        step = step_to_source(node, axis)
        if step is not None and self._is_repeated(node):
            self.replaced.add(node)
            if node.target is c10d.wait_tensor.default:
                return self._emit_gather(node_arg(node), axis, groups, after)
            value = self.get(*step, groups, after)
            if node.target is aten.cat.default:
                return self._emit_regrouped(node, value, axis)
            return value if dtype_of(step[0]) != dtype_of(node) else self._emit_view(node, value)
        with self.emitter(node) as e:
            return self._quantize(e, node, axis, groups, after)

    def _is_repeated(self, node: Node) -> bool:
        """Return whether the step is repeated in float8. A gather is where no reader needs 16 bits, a cast before a gather."""
        if node in self._stop_at:
            return False
        if node.target is c10d.wait_tensor.default:
            return node_arg(node) in self.float8_gathers
        step = element_effect(node)
        if step is None or step.kind is not Effect.CAST:
            return True
        return self.is_gathered_in_float8(node)

    def _emit_view(self, node: Node, value: QuantizedValue) -> QuantizedValue:
        """Emit the view, clone or transpose `node` of the quantized elements."""
        step = element_effect(node)
        assert step is not None
        # A cast or view to the dtype that the value had: the quantized value keeps its own.
        if node.target in (aten.copy.default, aten.view.dtype) or node.target in CASTS:
            return value
        args, kwargs = node.args[1:], dict(node.kwargs)
        with self.emitter(node) as e:
            q, scale = e.call(node.target, value.q, *args, **kwargs), value.scale
            if shape_of(scale) and step.kind is Effect.TRANSPOSE:
                scale = e.call(node.target, scale, *args, **kwargs)
            elif shape_of(scale) and is_same(shape_of(scale)[-1], 1):
                scale = e.reshape(scale, (*shape_of(node)[:-1], 1))
            return QuantizedValue(q, scale)

    def _emit_gather(self, gather: Node, axis: Axis, groups: tuple[str, ...], after: Node | None) -> QuantizedValue:
        shard, ranks, group = gather.args[:3]
        assert isinstance(shard, Node) and isinstance(group, str)
        self.replaced.add(gather)
        value = self.get(shard, axis, (*groups, group) if axis is None else groups, after)
        with self.emitter(gather) as e:
            q = e.call(gather.target, view_as_bytes(e, value.q), ranks, group)
            q = view_as_format(e, e.call(c10d.wait_tensor.default, q), dtype_of(value.q))
            scale = value.scale
            if axis is not None:
                scale = e.call(c10d.wait_tensor.default, e.call(gather.target, scale, ranks, group))
            return QuantizedValue(q, scale)

    def _emit_regrouped(self, cat: Node, value: QuantizedValue, axis: Axis) -> QuantizedValue:
        pieces = pieces_of(cat)
        uncut, cut_dim = match_regroup(pieces, len(pieces))  # type: ignore[misc]
        self.replaced.update((*pieces, *(node_arg(p) for p in pieces if node_arg(p) is not uncut)))
        count, dim = len(pieces), dim_of(cat)
        with self.emitter(cat) as e:
            # Some devices have no cat of float8.
            q = view_as_format(e, _regroup(e, view_as_bytes(e, value.q), count, cut_dim, dim), dtype_of(value.q))
            return QuantizedValue(q, value.scale if axis is None else _regroup(e, value.scale, count, cut_dim, dim))


def _regroup(e: Emitter, uncut: Node, count: int, cut_dim: int, dim: int) -> Node:
    """Cut dim `cut_dim` into `count` equal pieces and join them along `dim`."""
    size = shape_of(uncut)[cut_dim]
    split = e.call(aten.split.Tensor, uncut, e.size(size // count if isinstance(size, int) else size / count), cut_dim)
    return e.call(aten.cat.default, [e.item(split, i) for i in range(count)], dim)

"""Float8 twins of 16-bit values: quantised once, where the elements come from, and brought along the same way.

    x -> all_gather -> wait -> view -> mm          x -> quantise -> all_gather -> wait -> view -> _scaled_mm
                                         becomes        scale --(tensor: one of all ranks; rows: gathered beside)--^

`QuantizedValues.of` walks back from an operand and repeats every step of the way on the quantised elements. What was repeated once is
shared: by q, k and v, and by the weight gradient.
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
from .cast_nodes import as_bytes, cast_up, from_bytes, row_copy, transposed_copy
from .provenance import Axis, before, step_back


@dataclass(frozen=True, slots=True)
class QuantizedValue:
    """`q`: the elements in float8, in the value's shape. `scale`: [], or that shape with one dim of size 1."""

    q: Node
    scale: Node


Quantise = Callable[[Emitter, Node, Axis, tuple[str, ...]], QuantizedValue]
"""(emitter, value, axis, groups) -> its twin, made of the value itself; the ranks of `groups` need the same scale."""


class QuantizedValues:
    """Makes the twins of one graph. `travels`: the all_gathers whose elements may travel as float8 alone. `quantise`: how a
    value is cast where its elements come from. `inputs`: those that sizes are read off. `apart`: does a value have twins of its
    own in backward? `ends`: values that are cast as they are, wherever their elements come from."""

    def __init__(
        self,
        graph: Graph,
        travels: set[Node],
        quantise: Quantise,
        inputs: Sequence[Node],
        apart: Callable[[Node], bool] = lambda node: False,
        ends: Container[Node] = (),
    ) -> None:
        self.graph, self._quantise, self._inputs, self._ends = graph, quantise, inputs, ends
        self.travels, self.apart = travels, apart
        self.reader: Node
        """The node that twins are made for."""
        self.after: Node | None = None
        """A node of backward, where the reader is one."""
        self.replaced: set[Node] = set()
        """Nodes whose work a twin does now."""
        self._made: dict[tuple[Node, Axis, tuple[str, ...], Node | None], QuantizedValue] = {}
        self._copies: dict[tuple[Node, str], Node] = {}
        self._up: dict[Node, Node] = {}

    def of(self, node: Node, axis: Axis, groups: tuple[str, ...] = ()) -> QuantizedValue:
        key = (node, axis, groups, self.reader if self.apart(node) else None)
        if key not in self._made:
            self._made[key] = self._make(node, axis, groups)
        return self._made[key]

    def has(self, node: Node, axis: Axis) -> bool:
        """Is there a twin of `node`'s elements, or of what they are a view of?"""
        made = {(n, a) for n, a, *_ in self._made}
        here: tuple[Node, Axis] | None = (node, axis)
        while here is not None:
            if here in made:
                return True
            here = step_back(*here) if self._repeats(here[0]) else None
        return False

    def travelled(self, node: Node) -> bool:
        """Do `node`'s elements come from a gather that carries float8 now?"""
        found: Node | None = node
        while found is not None:
            if found in self.travels:
                return True
            found = before(found)
        return False

    def value(self, node: Node, axis: Axis) -> Node:
        """`node` as its float8 twin has it, in its own type."""
        if node not in self._up:
            twin = self.of(node, axis)
            with self.emitter(node) as e:
                self._up[node] = cast_up(e, twin.q, twin.scale, dtype_of(node))
        return self._up[node]

    def matrix(self, q: Node, row_major: bool) -> Node:
        """The 2D float8 `q` with rows, or else columns, in one piece each: the only layouts that the hardware multiplies."""
        strides = q.meta["val"].stride()
        if strides[1 if row_major else 0] == 1 and strides[0 if row_major else 1] != 1:
            return q
        if row_major:
            turned = q.target in (aten.t.default, aten.permute.default, aten.transpose.int)
            base = node_arg(q) if turned else q
            swapped = base.meta["val"].dim() == 2 and base.meta["val"].stride() == strides[::-1] != strides
            return self._copy(base) if swapped else self._rows(q)
        copy = self._copy(q)
        with self.emitter(copy) as e:
            return e.transpose(copy)

    def _copy(self, base: Node) -> Node:
        if (base, "turned") not in self._copies:
            with self.emitter(base) as e:
                self._copies[base, "turned"] = transposed_copy(e, base)
        return self._copies[base, "turned"]

    def _rows(self, q: Node) -> Node:
        """The same elements with rows in one piece."""
        if (q, "rows") not in self._copies:
            with self.emitter(q) as e:
                self._copies[q, "rows"] = row_copy(e, q)
        return self._copies[q, "rows"]

    @contextmanager
    def emitter(self, traced_as: Node) -> Iterator[Emitter]:
        """Emits in front of the reader at hand: what it needs was there before, or was made for an earlier reader."""
        with self.graph.inserting_before(self.reader):
            yield Emitter(self.graph, traced_as, {}, inputs=self._inputs)

    def _make(self, node: Node, axis: Axis, groups: tuple[str, ...]) -> QuantizedValue:
        found = step_back(node, axis)
        if found is not None and self._repeats(node):
            self.replaced.add(node)
            if node.target is c10d.wait_tensor.default:
                return self._gathered(node_arg(node), axis, groups)
            twin = self.of(*found, groups)
            if node.target is aten.cat.default:
                return self._regrouped(node, twin, axis)
            return twin if dtype_of(found[0]) != dtype_of(node) else self._replay(node, twin)
        with self.emitter(node) as e:
            return self._quantise(e, node, axis, groups)

    def _repeats(self, node: Node) -> bool:
        """Is the step repeated on float8? Gathers only where nobody needs their 16 bits, casts only on the way to a gather."""
        if node in self._ends:
            return False
        if node.target is c10d.wait_tensor.default:
            return node_arg(node) in self.travels
        step = element_effect(node)
        if step is None or step.effect is not Effect.CAST:
            return True
        return self.travelled(node)

    def _replay(self, node: Node, twin: QuantizedValue) -> QuantizedValue:
        """A view, clone or transpose of the twin's elements."""
        step = element_effect(node)
        assert step is not None
        # A cast or view to the type that it had: the twin keeps its own.
        if node.target in (aten.copy.default, aten.view.dtype) or node.target in CASTS:
            return twin
        args, kwargs = node.args[1:], dict(node.kwargs)
        with self.emitter(node) as e:
            q, scale = e.call(node.target, twin.q, *args, **kwargs), twin.scale
            if shape_of(scale) and step.effect is Effect.SWAP:
                scale = e.call(node.target, scale, *args, **kwargs)
            elif shape_of(scale) and is_same(shape_of(scale)[-1], 1):
                scale = e.reshape(scale, (*shape_of(node)[:-1], 1))
            return QuantizedValue(q, scale)

    def _gathered(self, gather: Node, axis: Axis, groups: tuple[str, ...]) -> QuantizedValue:
        shard, ranks, group = gather.args[:3]
        assert isinstance(shard, Node) and isinstance(group, str)
        self.replaced.add(gather)
        twin = self.of(shard, axis, (*groups, group) if axis is None else groups)
        with self.emitter(gather) as e:
            q = e.call(gather.target, as_bytes(e, twin.q), ranks, group)
            q = from_bytes(e, e.call(c10d.wait_tensor.default, q), dtype_of(twin.q))
            scale = twin.scale
            if axis is not None:
                scale = e.call(c10d.wait_tensor.default, e.call(gather.target, scale, ranks, group))
            return QuantizedValue(q, scale)

    def _regrouped(self, cat: Node, twin: QuantizedValue, axis: Axis) -> QuantizedValue:
        pieces = pieces_of(cat)
        whole, cut = match_regroup(pieces, len(pieces))  # type: ignore[misc]
        self.replaced.update((*pieces, *(node_arg(p) for p in pieces if node_arg(p) is not whole)))
        with self.emitter(cat) as e:
            # float8 has no cat everywhere
            q = from_bytes(e, _regroup(e, as_bytes(e, twin.q), len(pieces), cut, dim_of(cat)), dtype_of(twin.q))
            return QuantizedValue(q, twin.scale if axis is None else _regroup(e, twin.scale, len(pieces), cut, dim_of(cat)))


def _regroup(e: Emitter, whole: Node, count: int, cut: int, dim: int) -> Node:
    part = shape_of(whole)[cut] // count if isinstance(shape_of(whole)[cut], int) else shape_of(whole)[cut] / count
    split = e.call(aten.split.Tensor, whole, e.size(part), cut)
    return e.call(aten.cat.default, [e.item(split, i) for i in range(count)], dim)

"""Packed operands: matrices side by side in one, and the parts of the result.

    operands   [B1 | B2] by aten.cat, or ub_overlap.packed_weight for weights next to each other in memory; once for all sites
               of a graph that pack the same matrices
    B1 alone   in a later op of ours: a slice of [B1 | B2], so that B1 is written once, by the kernel that computes it
    scales     of the columns of float8 operands: [s1 | s2], as their operands
    results    slices: blocks of rows are contiguous, blocks of columns are not (part_strides.py)

Matrices are joined as they are stored. A stored weight [N, H] that is multiplied as [H, N] is joined along its rows, and the
transpose of the joined matrix is multiplied.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch.fx import Node

from ub_overlap.runtime.fp8.numerics import FLOAT8

from ..graph.aten import Effect, aten, dtype_of, element_effect, shape_of
from ..graph.emitter import Emitter
from ..graph.matmul import Operand
from ..graph.operand_source import find_source
from ..graph.sizes import Size, as_sizes, is_same, is_same_shape, numel


@dataclass(slots=True)
class PackedOperands:
    """The packed operands and the parts of results that were emitted into one graph."""

    parts: list[Node] = field(default_factory=list)
    """Slices of results."""
    _values: dict[tuple[object, ...], object] = field(default_factory=dict)
    """The values of slices, which are equal in all layers of a model."""
    _joined: dict[tuple[object, ...], Node] = field(default_factory=dict)
    _copies: dict[Operand, tuple[Node, int, int, int]] = field(default_factory=dict)
    """Where a joined matrix holds a copy of a matrix: the joined one, the dim, begin and end."""

    def emit(self, e: Emitter, operands: Sequence[Operand], dim: int, is_copied: bool = True, site: str = "") -> Node:
        """Emit the matrix of `operands` side by side along `dim`; a single one as it is.

        `is_copied`: False for weights that lie next to each other in memory. `site`: the name by which copies of these are
        logged once they have moved; empty: that of `e`.
        """
        if len(operands) == 1:
            return self.emit_one(e, operands[0])
        sources = [find_source(operand, e.current) for operand in operands]
        is_float8 = dtype_of(sources[0].node) in FLOAT8  # the hardware takes column-major right operands only
        is_transposed = is_float8 or 2 * sum(map(_is_column_major, sources)) > len(sources)
        if is_transposed:
            sources, dim = [source.t for source in sources], 1 - dim
        key = (*((s.node, s.shape, s.is_transposed) for s in sources), dim)
        if key not in self._joined:
            joined = self._joined[key] = _join(e, [e.operand(s) for s in sources], dim, None if is_copied else site or e.site)
            if is_copied:
                self._note_copies(sources, joined, dim)
        return e.transpose(self._joined[key]) if is_transposed else self._joined[key]

    def emit_scaled(
        self, e: Emitter, operands: Sequence[Operand], scales: Sequence[Node], is_copied: bool
    ) -> tuple[Node, Node]:
        """Emit float8 operands side by side, and the scales [1, N] of their columns.

        `is_copied`: as in `emit`; also False for cached casts that lie next to each other.
        """
        sources = [find_source(operand, e.current) for operand in operands]
        casts = [_cast_of(source, scale) for source, scale in zip(sources, scales, strict=True)]
        if len(operands) == 1 or is_copied or None in casts:
            return self.emit(e, operands, 1, is_copied), self.emit_vectors(e, scales)
        key = tuple(casts)
        if key not in self._joined:
            pairs = [[e.item(cast, i) for cast in casts if cast is not None] for i in range(2)]
            shapes = [(sum(shape_of(part)[0] for part in parts), shape_of(parts[0])[1]) for parts in pairs]
            values = [e.empty(shape, dtype_of(parts[0]), parts[0]) for shape, parts in zip(shapes, pairs, strict=True)]
            self._joined[key] = e.call(torch.ops.ub_overlap.fp8_packed_casts.default, *pairs, e.site, value_is=tuple(values))
        joined = self._joined[key]
        return e.transpose(e.item(joined, 0)), e.transpose(e.item(joined, 1))

    def emit_vectors(self, e: Emitter, vectors: Sequence[Node]) -> Node:
        """Emit the scales or biases of joined columns, [N] or [1, N], one after the other; a single one as it is."""
        if len(vectors) == 1:
            return vectors[0]
        key = tuple(map(e.current, vectors))
        if key not in self._joined:
            self._joined[key] = e.call(aten.cat.default, [e.reshape(v, (numel(shape_of(v)),)) for v in vectors])
        joined = self._joined[key]
        return joined if len(shape_of(vectors[0])) == 1 else e.reshape(joined, (1, *shape_of(joined)))

    def emit_one(self, e: Emitter, operand: Operand) -> Node:
        """Emit an operand: a slice of a joined matrix before it, if one holds a copy."""
        source = find_source(operand, e.current)
        for is_transposed, matrix in ((False, source), (True, source.t)):
            if matrix not in self._copies:
                continue
            joined, dim, begin, end = self._copies[matrix]
            part = self._slice(e, joined, dim, begin, end)
            if joined < part:  # else another matrix of it may depend on the op
                return e.transpose(part) if is_transposed else part
            part.graph.erase_node(part)
        return e.operand(operand)

    def _note_copies(self, sources: Sequence[Operand], joined: Node, dim: int) -> None:
        """Note the places of matrices that elementwise kernels compute. Other matrices are in memory anyway."""
        sizes = [(source.rows, source.cols)[dim] for source in sources]
        if not all(isinstance(size, int) for size in sizes):
            return
        for source, size, end in zip(sources, sizes, accumulate(sizes), strict=True):
            if torch.Tag.pointwise in getattr(source.node.target, "tags", ()):
                self._copies.setdefault(source, (joined, dim, end - size, end))

    def cut(self, e: Emitter, result: Node, sizes: Sequence[int], dim: int) -> list[Node]:
        """Emit the parts of `result` of these sizes along `dim`; all of it where it has one part."""
        if len(sizes) == 1:
            return [result]
        ends = accumulate(sizes)
        parts = [self._slice(e, result, dim, end - size, end) for size, end in zip(sizes, ends, strict=True)]
        self.parts += parts
        return parts

    def _slice(self, e: Emitter, matrix: Node, dim: int, begin: int, end: int) -> Node:
        shape = shape_of(matrix)
        key = (shape, dtype_of(matrix), dim, begin, end)
        part = e.call(aten.slice.Tensor, matrix, dim, begin, end, value_is=self._values.get(key))
        if all(isinstance(size, int) for size in shape):
            self._values[key] = part.meta["val"]
        return part


def _cast_of(source: Operand, scale: Node) -> Node | None:
    """Return the cached cast whose results are the stored matrix of an operand and the scales of its rows."""
    while (effect := element_effect(scale)) is not None and effect.kind in (Effect.SAME, Effect.TRANSPOSE):
        scale = effect.source
    q = source.node
    if not source.is_transposed or any(n.target is not operator.getitem for n in (q, scale)):
        return None
    cast = q.all_input_nodes[0]
    is_cast = cast.target is torch.ops.ub_overlap.fp8_cached_weight.default
    return cast if is_cast and q.args[1] == 0 and scale.args == (cast, 1) else None


def _is_column_major(operand: Operand) -> bool:
    """Return whether the columns of the matrix, as it is multiplied, are stored one after the other."""
    value = operand.node.meta["val"]
    is_stored_by_columns = False
    if is_same_shape(shape_of(operand.node), operand.shape):
        strides = as_sizes(value.stride())
        is_stored_by_columns = is_same(strides[0], 1) and not is_same(strides[1], 1)
    return is_stored_by_columns != operand.is_transposed


def _join(e: Emitter, matrices: Sequence[Node], dim: int, site: str | None) -> Node:
    """Emit one contiguous matrix. `site`: of weights that lie next to each other; None for others."""
    shapes = [shape_of(matrix) for matrix in matrices]
    total: Size = sum(shape[dim] for shape in shapes)
    shape = (total, shapes[0][1]) if dim == 0 else (shapes[0][0], total)
    dtype = dtype_of(matrices[0])
    if site is not None:
        value: torch.Tensor | None = e.empty(shape, dtype, matrices[0])
        return e.call(torch.ops.ub_overlap.packed_weight.default, list(matrices), site, value_is=value)
    # Some devices have no cat of float8.
    parts = [e.bitcast(matrix, torch.uint8) for matrix in matrices] if dtype in FLOAT8 else list(matrices)
    joined = e.call(aten.cat.default, parts, dim, value_is=e.empty(shape, dtype_of(parts[0]), parts[0]))
    return e.bitcast(joined, dtype)

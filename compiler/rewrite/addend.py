"""The addend of a reduction: everything that this rank adds to its matmuls, as one tensor."""

from __future__ import annotations

import torch
from torch.fx import Node

from ..graph.aten import aten, dtype_of, shape_of, tensor_of
from ..graph.emitter import Emitter
from ..graph.sizes import is_same, is_same_shape, numel, squeezed
from ..match.site import Addend, Reduction


def emit_addend(e: Emitter, m: Reduction) -> Node | None:
    """Emit the sum of the addends: a row [cols] if all rows of it are equal, else a matrix [rows, cols]. None without any."""
    row: Node | None = None
    matrix: Node | None = None
    for addend in m.addends:
        if _is_row(addend, m):
            row = _sum(e, row, _emit_row(e, addend, m))
        else:
            matrix = _sum(e, matrix, _emit_matrix(e, addend, m))
    if matrix is None or row is None:
        return matrix if matrix is not None else row
    return _sum(e, matrix, row)


def _sum(e: Emitter, total: Node | None, value: Node) -> Node:
    return value if total is None else e.call(aten.add.Tensor, total, value)


def _is_row(addend: Addend, m: Reduction) -> bool:
    """Return whether every row of the matrix that is reduced gets the same elements."""
    if not isinstance(addend.value, Node) or tensor_of(addend.value) is None:
        return True
    shape = shape_of(addend.value)
    if _is_single(shape):
        return True
    while shape and is_same(shape[0], 1):
        shape = shape[1:]
    is_suffix = is_same_shape(shape, addend.shape[-len(shape) :])
    return is_suffix and is_same(numel(shape), m.cols) and not addend.is_transposed


def _is_single(shape: tuple[object, ...]) -> bool:
    return is_same(numel(shape), 1)


def _emit_row(e: Emitter, addend: Addend, m: Reduction) -> Node:
    """Emit an addend as [cols]."""
    value, dtype, device = addend.value, _dtype(m), m.terms[0].node.meta["val"].device
    options = {"dtype": dtype, "device": device, "pin_memory": False}
    if not isinstance(value, Node) or tensor_of(value) is None:
        number = value if isinstance(value, Node) else value * addend.factor
        row = e.call(aten.full.default, [e.size(m.cols)], number, **options)
        return row if number is not value or addend.factor == 1 else _scaled(e, row, addend.factor)
    if value.meta["val"].device != device:  # a CPU tensor without dims: only those may be added to tensors on a GPU
        zeros = e.call(aten.full.default, [e.size(m.cols)], 0.0, **options)
        return e.call(aten.add.Tensor, zeros, value, alpha=addend.factor)
    value = _scaled(e, e.cast(value, dtype), addend.factor)
    if not _is_single(shape_of(value)):
        return e.reshape(value, (m.cols,))
    return _broadcast(e, e.reshape(value, (1,)), (m.cols,))


def _emit_matrix(e: Emitter, addend: Addend, m: Reduction) -> Node:
    """Emit an addend as [rows, cols]."""
    assert isinstance(addend.value, Node)
    value = _scaled(e, e.cast(addend.value, _dtype(m)), addend.factor)
    if not is_same_shape(squeezed(shape_of(value)), squeezed(addend.shape)):
        value = _broadcast(e, value, addend.shape)
    if addend.is_transposed:
        value = e.transpose(e.reshape(value, squeezed(addend.shape)))
    return e.reshape(value, (m.rows, m.cols))


def _broadcast(e: Emitter, value: Node, shape: tuple[object, ...]) -> Node:
    """Emit a contiguous copy of `value` in the shape that it broadcasts to."""
    view = e.call(aten.expand.default, value, [e.size(s) for s in shape])
    return e.call(aten.clone.default, view, memory_format=torch.contiguous_format)


def _scaled(e: Emitter, value: Node, factor: float) -> Node:
    return value if factor == 1 else e.call(aten.mul.Tensor, value, factor)


def _dtype(m: Reduction) -> torch.dtype:
    return dtype_of(m.terms[0].node)

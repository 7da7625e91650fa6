"""Fix the memory layouts that scaled matmuls require: row-major left operands, column-major right operands, dense scales.

The hardware multiplies no other layouts, but Inductor chooses the layouts of its results. It may replace a transposed
copy of a pointwise result by a view of it. Only a GPU would notice.
"""

from __future__ import annotations

from torch.fx import Graph, Node

from ub_overlap import _torch_compat as compat

from ..graph.aten import aten, shape_of
from ..graph.emitter import Emitter, SizeUnknown
from ..graph.sizes import Size
from ..joint.joint_decision import joint_decision


def pin_operand_layouts(graph: Graph) -> int:
    """Fix the operand layouts of the scaled matmuls that replaced matmuls of the model. Return their number."""
    scaled_matmuls = graph.find_nodes(op="call_function", target=aten._scaled_mm.default)
    inserted = [n for n in scaled_matmuls if joint_decision(n).cast is not None]
    pinned: dict[tuple[Node, bool], Node] = {}
    for matmul in inserted:
        operands = []
        for row_major, operand in zip((True, False), matmul.args[:2], strict=True):
            assert isinstance(operand, Node)
            if (operand, row_major) not in pinned:
                with graph.inserting_before(matmul):
                    pinned[operand, row_major] = _pin(Emitter(graph, matmul, {}), operand, row_major)
            operands.append(pinned[operand, row_major])
        matmul.args = (*operands, *matmul.args[2:])
    return len(inserted)


def emit_contiguous_scales(e: Emitter, scales: Node, shape: tuple[Size, ...]) -> Node:
    """Emit `scales` as [M, 1] or [1, N] with the strides that torch's kernels require.

    Inductor chooses any stride for a dim of size 1. A shape with a size that no input determines is only reshaped.
    """
    if len(shape) != 2:
        return e.reshape(scales, shape)
    try:
        rows, columns = map(e.size, shape)
    except SizeUnknown:
        return e.reshape(scales, shape)
    flat = e.call(aten.reshape.default, scales, [-1])
    return e.call(aten.as_strided.default, flat, [rows, columns], [columns, 1])


def _pin(e: Emitter, operand: Node, row_major: bool) -> Node:
    """Emit `operand` in the required layout, whatever layout its own node has: passes may have replaced that node."""
    rows, cols = shape_of(operand)
    try:
        strides = [e.size(cols), 1] if row_major else [1, e.size(rows)]
    except SizeUnknown:
        return operand
    return e.call(compat.__getattr__("force_stride_order"), operand, strides)

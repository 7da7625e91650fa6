"""Scaled products keep the layouts of their operands: rows of the left one in one piece, columns of the right one.

The hardware multiplies nothing else, but Inductor lays out what it computes as it likes: a transposed copy of a product of
pointwise ops may come out as the view that it is a copy of, and only a GPU would notice.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from ub_overlap import _torch_compat as compat

from ..graph.aten import aten, shape_of
from ..graph.emitter import Emitter, SizeUnknown
from ..graph.sizes import Size
from ..joint.joint_decision import joint_decision


def pin(graph: Graph) -> int:
    """Fixes the layouts of both operands of every scaled product that stands in `graph` for one of the model's. Returns of how
    many products."""
    products = graph.find_nodes(op="call_function", target=aten._scaled_mm.default)
    found = [n for n in products if joint_decision(n).cast is not None]
    pinned: dict[tuple[Node, bool], Node] = {}
    for product in found:
        operands = []
        for row_major, operand in zip((True, False), product.args[:2], strict=True):
            assert isinstance(operand, Node)
            if (operand, row_major) not in pinned:
                with graph.inserting_before(product):
                    pinned[operand, row_major] = _fixed(Emitter(graph, product, {}), operand, row_major)
            operands.append(pinned[operand, row_major])
        product.args = (*operands, *product.args[2:])
    return len(found)


def contiguous_scales(e: Emitter, scales: Node, shape: tuple[Size, ...]) -> Node:
    """`scales` as [M, 1] or [1, N] with the strides that torch's kernels ask for: in a dim of size 1 Inductor would choose any.
    (Of dynamic sizes: in that shape.)"""
    if len(shape) != 2 or not all(isinstance(s, int) for s in shape):
        return e.reshape(scales, shape)
    flat = e.call(aten.reshape.default, scales, [-1])
    return e.call(aten.as_strided.default, flat, list(shape), [shape[1], 1])


def _fixed(e: Emitter, operand: Node, row_major: bool) -> Node:
    strides: list[Size] = list(operand.meta["val"].stride())
    if any(isinstance(s, torch.SymInt) for s in strides):
        rows, cols = shape_of(operand)
        strides = [cols, 1] if row_major else [1, rows]
    try:
        return e.call(compat.__getattr__("force_stride_order"), operand, [e.size(s) for s in strides])
    except SizeUnknown:
        return operand

"""Emit the scaled float8 matmul that replaces a 16-bit one, and let other readers share its quantized operands."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import Graph, Node

from ...graph.aten import aten, dtype_of, shape_of
from ...graph.emitter import Emitter
from ...graph.joint_graph import CHECKPOINT_KEYS
from ...graph.matmul import Matmul, Operand
from ...joint.joint_decision import record_decision
from ...plan.decision import CastDecision
from ..operand_layout import emit_contiguous_scales
from ..provenance import Axis, find_origin, step_to_source
from ..quantized_values import QuantizedValues
from .linears import Role


def axis_of(operand: Operand, is_lhs: bool, per_row: bool) -> Axis:
    """Return the dim of `operand.node` that the matmul sums over, if that has scales of its own."""
    return (-1 if is_lhs != operand.is_transposed else -2) if per_row else None


def axis_of_origin(node: Node, per_row: bool) -> Axis:
    """Return the dim of `node` that is the last dim of its origin: forward quantized the value along it."""
    if not per_row:
        return None
    previous, axis = node, -1
    while (step := step_to_source(previous, axis)) is not None:
        previous, axis = step[0], step[1]  # type: ignore[assignment]
    return axis


def emit_scaled_matmul(matmul: Matmul, values: QuantizedValues, per_row: bool, decision: CastDecision) -> Node:
    """Emit the scaled form of `matmul`, in the shape and dtype of its node."""
    node, dtype = matmul.node, dtype_of(matmul.node)
    values.reader = node
    is_forward = decision.role == Role.FORWARD.value
    # Per-row scales give bfloat16 on every torch.
    result_dtype = torch.bfloat16 if per_row else dtype
    bias = matmul.bias if _is_fusible_bias(matmul.bias, result_dtype) else None
    with values.emitter(node) as e:
        (a, a_scale), (b, b_scale) = _emit_operands(e, matmul, values, per_row, is_forward)
        a, b = values.lay_out(a, True), values.lay_out(b, False)
        result = e.call(aten._scaled_mm.default, a, b, a_scale, b_scale, bias, None, result_dtype, is_forward)
        record_decision(result, cast=decision)
        # Saved for backward where the program saves the matmul.
        result.meta |= {k: node.meta[k] for k in CHECKPOINT_KEYS if k in node.meta}
        result = e.cast(result, dtype)
        if matmul.bias is not None and bias is None:
            result = e.call(aten.add.Tensor, result, matmul.bias)
        return e.reshape(result, shape_of(node))


def replace_matmul(graph: Graph, node: Node, scaled: Node, verified: CastDecision | None) -> None:
    """Let the users of `node` read `scaled`. `verified`: `node` stays and its result is compared."""
    if verified is None:
        node.replace_all_uses_with(scaled)
        return
    with graph.inserting_after(node):
        compared = Emitter(graph, node, {}).call(torch.ops.ub_overlap.compare.default, scaled, node, verified.key, True)
    node.replace_all_uses_with(compared, delete_user_cb=lambda user: user is not compared)
    record_decision(node, cast=None)


def read_dequantized(reader: Node, values: QuantizedValues, per_row: bool, shares: Callable[[Node], bool]) -> None:
    """Let the high-precision `reader` read dequantized values, so that no 16-bit value is gathered or saved for it.

    It reads values that are gathered in float8, and those that are quantized for others and that `shares` accepts.
    """
    values.reader = reader
    for value in reader.all_input_nodes:
        axis = axis_of_origin(value, per_row)
        if values.is_gathered_in_float8(value) or (shares(value) and values.has(value, axis)):
            reader.replace_input_with(value, values.dequantize(value, axis))


def _is_fusible_bias(bias: Node | None, result_dtype: torch.dtype) -> bool:
    """Return whether `_scaled_mm` adds `bias`: a vector of the result's dtype, which is not float32."""
    return bias is not None and len(shape_of(bias)) == 1 and dtype_of(bias) == result_dtype != torch.float32


def _emit_operands(
    e: Emitter, matmul: Matmul, values: QuantizedValues, per_row: bool, is_forward: bool
) -> list[tuple[Node, Node]]:
    """Emit (q, scale) of lhs and of rhs.

    In backward the gradient is quantized first, and the cast of a weight follows it. It does not follow a gather of the
    gradient, which would have to end before the matmul begins.
    """
    operands = [(matmul.lhs, True), (matmul.rhs, False)]
    emitted: dict[bool, tuple[Node, Node]] = {}
    after: Node | None = None
    for operand, is_lhs in sorted(operands, key=lambda pair: values.is_cast_per_reader(pair[0].node)):
        axis = axis_of(operand, is_lhs, per_row)
        emitted[is_lhs] = _emit_operand(e, operand, values, axis, after)
        after = None if is_forward else find_origin(values.get(operand.node, axis).scale)
    return [emitted[True], emitted[False]]


def _emit_operand(e: Emitter, operand: Operand, values: QuantizedValues, axis: Axis, after: Node | None) -> tuple[Node, Node]:
    """Emit (q, scale) as the matmul reads them: q in 2D; scale [], [r, 1] or [1, c]."""
    value = values.get(operand.node, axis, after=after)
    q, scale = e.reshape(value.q, operand.shape), value.scale
    if axis == -1:
        scale = emit_contiguous_scales(e, scale, (operand.shape[0], 1))
    elif axis is not None:
        scale = e.reshape(scale, (1, operand.shape[1]))
    if not operand.is_transposed:
        return q, scale
    return e.transpose(q), e.transpose(scale) if axis is not None else scale

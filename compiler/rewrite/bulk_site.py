"""Rewrite a collective and independent matmuls as one op, so that nothing is reordered or freed in between."""

from __future__ import annotations

import torch
from torch.fx import Node

from ..graph.aten import dtype_of
from ..graph.emitter import Emitter
from ..match.site import Bulk
from ..plan.strategy import DispatchTable, Strategy
from .independent_matmuls import independent_operands, independent_results
from .narrow_input import emit_narrow
from .packed_operands import PackedOperands


def rewrite_bulk(
    e: Emitter, m: Bulk, strategy: Strategy | DispatchTable, site: str, packed: PackedOperands
) -> dict[Node, Node]:
    """Emit the op. Return the replacement of each node.

    The insertion point is after the collective's input and every operand.
    """
    c = m.collective
    assert c.wait is not None and c.op is not None
    lhs, rhs = independent_operands(e, m, packed)
    tensor = emit_narrow(e, c.input, c.widening) if c.widening else c.input
    op = e.call(
        torch.ops.ub_overlap.bulk.default, tensor, lhs, rhs, c.op.value, c.reduce_op, dtype_of(c.node), str(strategy), c.group,
        site,
    )  # fmt: skip
    replaced = independent_results(e, m, e.item(op, 1))
    value = e.item(op, 0)
    for target, constant in c.widening.scalings if c.widening else ():
        value = e.call(target, value, constant)
    replaced[c.wait] = replaced[c.node] = value
    return replaced

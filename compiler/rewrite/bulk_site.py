"""Rewrite a collective and independent matmuls as one op, so that nothing is reordered or freed in between."""

from __future__ import annotations

import torch
from torch.fx import Node

from ..graph.aten import aten, shape_of
from ..graph.emitter import Emitter
from ..match.site import Bulk
from ..plan.strategy import DispatchTable, Strategy


def rewrite_bulk(e: Emitter, m: Bulk, strategy: Strategy | DispatchTable, site: str) -> dict[Node, Node]:
    """Emit the op. Return the replacement of each node.

    The insertion point is after the collective's input and every operand.
    """
    c = m.collective
    assert c.wait is not None and c.op is not None
    lhs, rhs = [e.operand(p.lhs) for p in m.matmuls], [e.operand(p.rhs) for p in m.matmuls]
    op = e.call(torch.ops.ub_overlap.bulk.default, c.input, lhs, rhs, c.op.value, c.reduce_op, str(strategy), c.group, site)
    outs = e.item(op, 1)
    replaced: dict[Node, Node] = {}
    for i, p in enumerate(m.matmuls):
        value = e.reshape(e.item(outs, i), shape_of(p.node))
        replaced[p.node] = value if p.bias is None else e.call(aten.add.Tensor, value, p.bias)
    replaced[c.wait] = replaced[c.node] = e.item(op, 0)
    return replaced

"""Rewrite a collective and what follows a reduction as one op."""

from __future__ import annotations

import torch
from torch.fx import Node

from ..graph.aten import dtype_of, shape_of
from ..graph.emitter import Emitter
from ..match.site import Fused
from ..plan.strategy import DispatchTable, Strategy


def rewrite_fused(e: Emitter, m: Fused, strategy: Strategy | DispatchTable, site: str) -> dict[Node, Node]:
    """Emit the op. Return the replacement of each node.

    The sum with the residual, or else the collective's result, is the first result. The norm is the second.
    """
    c, norm = m.collective, m.norm
    assert c.op is not None
    kind, epsilon, rounds = (norm.kind, norm.epsilon, norm.round_before_weight) if norm else ("none", 0.0, False)
    op = e.call(
        torch.ops.ub_overlap.fused_collective.default, c.input, c.op.value, c.reduce_op or "sum", m.residual, kind,
        norm.weight if norm else None, norm.bias if norm else None, epsilon, rounds, None, dtype_of(c.input), str(strategy),
        c.group, site,
    )  # fmt: skip
    summed = e.item(op, 0)
    if m.sum is None:
        replaced = {m.reduced: summed, c.node: summed}
    else:
        replaced = {m.sum: e.reshape(summed, shape_of(m.sum), m.sum)}
    if norm is not None:
        replaced[norm.out] = e.reshape(e.item(op, 1), shape_of(norm.out), norm.out)
    return replaced

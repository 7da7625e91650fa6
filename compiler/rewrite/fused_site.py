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

    The sum with the residual, or else the collective's result, is the first result. The norm, or its cast, is the second. The
    scales of the norm's rows are the third.
    """
    c, norm, cast = m.collective, m.norm, m.cast
    assert c.op is not None
    kind, epsilon = (norm.kind, norm.epsilon) if norm else ("none", 0.0)
    rounds, offset = (norm.round_before_weight, norm.weight_offset) if norm else (False, 0.0)
    scales = (cast.scale, cast.amax_factor, cast.least_scale, cast.divides) if cast else (None, 0.0, 0.0, False)
    op = e.call(
        torch.ops.ub_overlap.fused_collective.default, c.input, c.op.value, c.reduce_op or "sum", m.residual, kind,
        norm.weight if norm else None, norm.bias if norm else None, epsilon, m.round_sum, rounds, offset, *scales,
        dtype_of(cast.out if cast else c.input), str(strategy), c.group, site,
    )  # fmt: skip
    replaced: dict[Node, Node] = {}

    def replace(old: Node | None, index: int) -> None:
        if old is not None:
            replaced[old] = e.reshape(e.item(op, index), shape_of(old), old)

    if m.residual is None:
        replaced[m.reduced] = replaced[c.node] = e.item(op, 0)
    replace(m.sum, 0)
    if norm is not None:
        replace(cast.out if cast else norm.out, 1)
    replace(cast.row_scales if cast else None, 2)
    return replaced

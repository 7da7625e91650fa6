"""Rewrite a collective and what follows a reduction as one op."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from ..graph.aten import dtype_of, shape_of
from ..graph.emitter import Emitter
from ..match.branch import Branch
from ..match.norm import Norm
from ..match.site import Fused
from ..plan.strategy import DispatchTable, Strategy


def rewrite_fused(e: Emitter, m: Fused, strategy: Strategy | DispatchTable, site: str) -> dict[Node, Node]:
    """Emit the op. Return the replacement of each node.

    The sum with the residual, or else the collective's result, is the first result. The norm, or its cast, is the second. The
    scales of the norm's rows are the third.
    """
    c, cast = m.collective, m.cast
    assert c.op is not None
    branch, norm = _branch_arguments(m.branch or Branch(m.reduced)), _norm_arguments(m.norm)
    scales = (cast.scale, cast.amax_factor, cast.least_scale, cast.divides) if cast else (None, 0.0, 0.0, False)
    op = e.call(
        torch.ops.ub_overlap.fused_collective.default, c.input, c.op.value, c.reduce_op or "sum", *branch, m.residual,
        *norm[:4], m.round_sum, *norm[4:], *scales, dtype_of(cast.out if cast else c.input), str(strategy), c.group, site,
    )  # fmt: skip
    replaced: dict[Node, Node] = {}

    def replace(old: Node | None, index: int) -> None:
        if old is not None:
            replaced[old] = e.reshape(e.item(op, index), shape_of(old), old)

    if m.residual is None:
        replaced[m.reduced] = replaced[c.node] = e.item(op, 0)
    replace(m.sum, 0)
    if m.norm is not None:
        replace(cast.out if cast else m.norm.out, 1)
    replace(cast.row_scales if cast else None, 2)
    return replaced


def _branch_arguments(branch: Branch) -> tuple[Any, ...]:
    """Return the arguments from `linear_bias` to `addend`."""
    return (branch.linear_bias, *_norm_arguments(branch.norm), branch.factor, branch.addend)


def _norm_arguments(norm: Norm | None) -> tuple[Any, ...]:
    """Return the arguments of a norm: kind, weight, bias, epsilon, whether it rounds before the weight, weight offset."""
    if norm is None:
        return "none", None, None, 0.0, False, 0.0
    return norm.kind, norm.weight, norm.bias, norm.epsilon, norm.round_before_weight, norm.weight_offset

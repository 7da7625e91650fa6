"""Rewrite the independent matmuls of a site: operands of its op, and the op's results in place of the matmuls."""

from __future__ import annotations

import torch
from torch.fx import Node

from ..graph.aten import aten, shape_of
from ..graph.emitter import Emitter
from ..match.site import Site
from .packed_operands import PackedOperands


def independent_operands(e: Emitter, m: Site, packed: PackedOperands) -> tuple[list[Node], list[Node]]:
    """Emit the left and the right operands."""
    return [packed.emit_one(e, p.lhs) for p in m.independent], [packed.emit_one(e, p.rhs) for p in m.independent]


def independent_results(e: Emitter, m: Site, outs: Node, first: int = 0) -> dict[Node, Node]:
    """Return the replacement of each matmul. `outs`: the list of the op's results; theirs begin at `first`."""
    replaced = {}
    for i, p in enumerate(m.independent, first):
        value = e.reshape(e.item(outs, i), shape_of(p.node))
        replaced[p.node] = value if p.bias is None else e.call(aten.add.Tensor, value, p.bias)
    return replaced


def independent_values(e: Emitter, m: Site) -> list[torch.Tensor | None]:
    """Return the values of the results; None for symbolic sizes."""
    return [e.output_value(p.shape, p.node) for p in m.independent]

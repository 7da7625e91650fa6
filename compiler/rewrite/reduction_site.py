"""Rewrite a sum of matmuls -> reduce_scatter or all_reduce as one op. Scalings that commute follow it."""

from __future__ import annotations

import torch
from torch.fx import Node

from ..graph.aten import dtype_of, shape_of
from ..graph.emitter import Emitter
from ..match.collectives import Op
from ..match.pack_groups import term_packs
from ..match.site import Reduction
from ..plan.strategy import DispatchTable, Strategy
from .addend import emit_addend
from .independent_matmuls import independent_operands, independent_results, independent_values
from .packed_operands import PackedOperands


def rewrite_reduction(
    e: Emitter, m: Reduction, strategy: Strategy | DispatchTable, site: str, packed: PackedOperands, wire_dtype: str = ""
) -> dict[Node, Node]:
    """Emit the op. Return the replacement of each node. The insertion point is after every operand and addend.

    `wire_dtype`: the decision's type on the wire; "" sends the type of the matmuls.
    """
    c = m.collective
    assert c.wait is not None
    op = _emit_op(e, m, str(strategy), site, packed, wire_dtype or "plain")
    value = e.item(op, 0) if m.terms[0].scales is None else op
    for permute in m.permutes:
        shape = permute.shard_shape if c.op is Op.REDUCE_SCATTER else permute.before
        value = e.permute(e.reshape(value, shape), permute.dims)
    value = e.reshape(value, shape_of(c.wait), old=None if m.scalings else c.wait)
    for target, constant in m.scalings:
        value = e.call(target, value, constant)
    value = e.cast(value, dtype_of(c.wait))
    replaced = {c.wait: value, c.node: value}
    if m.independent:
        replaced.update(independent_results(e, m, e.item(op, 2)))
    if m.kept_nodes:
        partial = e.item(op, 1)
        root = e.reshape(e.permute(partial, [1, 0]) if m.root_is_transposed else partial, shape_of(m.root))
        replaced.update(_restore_kept(e, m, root))
    return replaced


def _emit_op(e: Emitter, m: Reduction, strategy: str, site: str, packed: PackedOperands, wire: str) -> Node:
    c, dtype = m.collective, dtype_of(m.terms[0].node)
    packs = term_packs(m)
    lhs = [packed.emit(e, [t.lhs for t in pack], 1) for pack in packs]
    copies = m.pack_copies or ("",) * len(packs)
    rhs = [packed.emit(e, [t.rhs for t in pack], 0, "rhs" in copied) for pack, copied in zip(packs, copies, strict=True)]
    addend, keep = emit_addend(e, m), bool(m.kept_nodes)
    # A scaling that kept the sum in range now follows it. Until then the sum stays in float32.
    out_dtype = torch.float32 if m.scalings else dtype_of(c.node)
    scales = [t.scales for t in m.terms if t.scales is not None]
    if scales:
        outputs = _static_outputs(e, m, lhs[0])
        return e.call(
            torch.ops.ub_overlap.scaled_matmul_reduce_scatter.default, lhs, rhs, [s.lhs for s in scales],
            [s.rhs for s in scales], addend, e.size(m.blocks.outer), c.reduce_op, dtype, out_dtype, scales[0].fast, wire,
            strategy, c.group, site, value_is=outputs[0] if outputs is not None else None,
        )  # fmt: skip
    if c.op is Op.REDUCE_SCATTER:
        outer = 1 if m.shard_dim_is_last else e.size(m.blocks.outer)
        return e.call(
            torch.ops.ub_overlap.matmul_reduce_scatter.default, lhs, rhs, addend, outer, m.shard_dim_is_last, c.reduce_op,
            out_dtype, keep, "plain", *independent_operands(e, m, packed), strategy, c.group, site,
            value_is=_static_outputs(e, m, lhs[0]),
        )  # fmt: skip
    return e.call(
        torch.ops.ub_overlap.matmul_all_reduce.default,
        lhs,
        rhs,
        addend,
        c.reduce_op,
        out_dtype,
        keep,
        *independent_operands(e, m, packed),
        strategy,
        c.group,
        site,
    )


def _restore_kept(e: Emitter, m: Reduction, root: Node) -> dict[Node, Node]:
    """The kept nodes between root and collective, recomputed from the sum that the op keeps."""
    copies, chain = {m.root: root}, {m.root, *m.view_chain}

    def copy(node: Node) -> Node:
        if node not in copies:
            args = torch.fx.node.map_arg(node.args, lambda n: copy(n) if n in chain else n)
            copies[node] = e.call(node.target, *args, **node.kwargs)
        return copies[node]

    return {node: copy(node) for node in m.kept_nodes}


def _static_outputs(e: Emitter, m: Reduction, lhs: Node) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]] | None:
    """The output values of a reduce_scatter, result and sum, if all sizes are static."""
    rows, cols, ranks = m.rows, m.cols, m.collective.ranks
    if not isinstance(rows, int) or not isinstance(cols, int):
        return None
    assert m.collective.wait is not None
    shape = (rows, cols // ranks) if m.shard_dim_is_last else (rows // ranks, cols)
    out = e.empty(shape, torch.float32, lhs) if m.scalings else e.output_value(shape, m.collective.wait)
    partial = e.empty((rows, cols) if m.kept_nodes else (0,), dtype_of(m.terms[0].node), lhs)
    independent = independent_values(e, m)
    if out is None or partial is None or any(v is None for v in independent):
        return None
    return out, partial, independent  # type: ignore[return-value]

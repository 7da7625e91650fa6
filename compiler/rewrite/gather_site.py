"""Rewrite all_gather -> matmuls as one op. Other readers of the gathered tensor read the copy that the op keeps."""

from __future__ import annotations

import torch
from torch.fx import Node

from ..graph.aten import aten, dtype_of, shape_of
from ..graph.emitter import Emitter
from ..graph.sizes import divide, numel
from ..match.pack_groups import consumer_packs
from ..match.site import Consumer, Gather
from ..plan.strategy import DispatchTable, Strategy
from .gathered_alias import restore_alias
from .independent_matmuls import independent_operands, independent_results, independent_values
from .packed_operands import PackedOperands

Outputs = tuple[torch.Tensor, list[torch.Tensor]]
ScaledOutputs = tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]


def rewrite_gather(
    e: Emitter, m: Gather, strategy: Strategy | DispatchTable, site: str, packed: PackedOperands
) -> dict[Node, Node]:
    """Emit the op. Return the replacement of each node. The insertion point is after every operand."""
    shard = _shard(e, m)
    packs = consumer_packs(m)
    copies = m.pack_copies or ("",) * len(packs)
    outer = 1 if m.shard_dim_is_last else e.size(m.blocks.outer)
    if m.scaled is not None:
        return _rewrite_scaled(e, m, shard, outer, strategy, site, packed)
    operands = [packed.emit(e, [k.operand for k in pack], 1, "rhs" in c) for pack, c in zip(packs, copies, strict=True)]
    op = e.call(
        torch.ops.ub_overlap.all_gather_matmul.default,
        shard,
        operands,
        [pack[0].transpose_gathered for pack in packs],
        [pack[0].transpose_out for pack in packs],
        outer,
        m.shard_dim_is_last,
        bool(m.kept_aliases),
        *independent_operands(e, m, packed),
        str(strategy),
        m.collective.group,
        site,
        value_is=_static_outputs(e, m, shard),
    )
    outs = e.item(op, 1)
    replaced = _results(e, m, outs, packed)
    for k in m.consumers:
        if k.compute.bias is not None:
            replaced[k.compute.node] = e.call(aten.add.Tensor, replaced[k.compute.node], k.compute.bias)
    replaced.update(independent_results(e, m, outs, len(packs)))
    if m.kept_aliases:
        gathered = e.item(op, 0)
        replaced.update({node: restore_alias(e, m, gathered, node, m.permutes) for node in m.kept_aliases})
    return replaced


def _results(e: Emitter, m: Gather, outs: Node, packed: PackedOperands) -> dict[Node, Node]:
    """Emit the value of each consumer: a result of the op, or a part of one."""
    values: dict[Node, Node] = {}
    for i, pack in enumerate(consumer_packs(m)):
        sizes = [k.operand.cols for k in pack]
        parts = packed.cut(e, e.item(outs, i), sizes, 0 if pack[0].transpose_out else 1)
        for k, part in zip(pack, parts, strict=True):
            node = k.compute.node
            values[node] = e.reshape(part, shape_of(node), old=node if len(pack) == 1 else None)
    return values


def _shard(e: Emitter, m: Gather) -> Node:
    """The op's input [rows, cols]: the collective's, cast, permuted and reshaped."""
    c = m.collective
    shard = e.bitcast(c.input, m.dtype) if m.scaled is not None else e.cast(c.input, m.dtype)
    for permute in m.permutes:
        shard = e.permute(e.reshape(shard, permute.shard_shape), permute.dims)
    cols = m.blocks.inner if m.shard_dim_is_last else m.cols
    if shape_of(shard) and shape_of(shard)[-1] == cols:
        return shard
    rows = divide(numel(shape_of(shard)), cols)
    assert rows is not None, "the match proved that a shard is whole rows"
    return e.reshape(shard, (rows, cols))


def _rewrite_scaled(
    e: Emitter,
    m: Gather,
    shard: Node,
    outer: int | Node,
    strategy: Strategy | DispatchTable,
    site: str,
    packed: PackedOperands,
) -> dict[Node, Node]:
    """Emit the op for float8. It takes scales, adds biases itself, and returns the scales of kept rows."""
    assert m.scaled is not None
    shard_scale = m.scaled.lhs
    if m.scales is not None:
        shard_scale = e.reshape(m.scales.collective.input, (numel(shape_of(m.scales.collective.input)), 1))
    operands, scales, biases, dtypes = [], [], [], []
    packs = consumer_packs(m)
    for pack, copied in zip(packs, m.pack_copies or ("",) * len(packs), strict=True):
        own_scales = [k.compute.scales.rhs for k in pack if k.compute.scales is not None]
        operand, scale = packed.emit_scaled(e, [k.operand for k in pack], own_scales, "rhs" in copied)
        operands.append(operand)
        scales.append(scale)
        own = [k.compute.bias for k in pack if k.compute.bias is not None]  # all consumers of a pack have one, or none has
        biases.append(packed.emit_vectors(e, own) if own else None)
        dtypes.append(dtype_of(pack[0].compute.node))
    keep = bool(m.kept_aliases) or bool(m.scales and m.scales.kept_aliases)
    op = e.call(
        torch.ops.ub_overlap.all_gather_scaled_matmul.default, shard, shard_scale, operands, scales, biases, outer, keep,
        dtypes, m.scaled.fast, str(strategy), m.collective.group, site, value_is=_static_scaled_outputs(e, m, shard, keep),
    )  # fmt: skip
    replaced = _results(e, m, e.item(op, 2), packed)
    if m.kept_aliases:
        gathered = e.item(op, 0)
        replaced.update({node: restore_alias(e, m, gathered, node, m.permutes) for node in m.kept_aliases})
    if m.scales is not None and m.scales.kept_aliases:
        gathered = e.item(op, 1)
        replaced.update({node: restore_alias(e, m.scales, gathered, node) for node in m.scales.kept_aliases})
    return replaced


def _static_outputs(e: Emitter, m: Gather, shard: Node) -> Outputs | None:
    """The op's output values if all sizes are static."""
    gathered = e.empty((m.rows, m.cols) if m.kept_aliases else (0,), dtype_of(shard), shard)
    outs = [*(_static_result(e, pack) for pack in consumer_packs(m)), *independent_values(e, m)]
    return None if gathered is None or any(o is None for o in outs) else (gathered, outs)  # type: ignore[return-value]


def _static_result(e: Emitter, pack: tuple[Consumer, ...]) -> torch.Tensor | None:
    """The value of the result of a pack."""
    first = pack[0].compute
    if len(pack) == 1:
        return e.output_value(first.shape, first.node)
    total = sum(k.operand.cols for k in pack)
    shape = (total, first.shape[1]) if pack[0].transpose_out else (first.shape[0], total)
    return e.empty(shape, dtype_of(first.node), first.node)


def _static_scaled_outputs(e: Emitter, m: Gather, shard: Node, keep: bool) -> ScaledOutputs | None:
    """The output values of the op for float8 if all sizes are static."""
    gathered = e.empty((m.rows, m.cols) if keep else (0,), dtype_of(shard), shard)
    scale = e.empty((m.rows, 1) if keep and m.scales is not None else (0,), torch.float32, shard)
    outs = [_static_result(e, pack) for pack in consumer_packs(m)]
    if gathered is None or scale is None or any(o is None for o in outs):
        return None
    return gathered, scale, outs  # type: ignore[return-value]

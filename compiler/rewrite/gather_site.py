"""all_gather -> matmuls becomes one op; who else read the gathered tensor reads the one the op keeps."""

from __future__ import annotations

import torch
from torch.fx import Node

from ..graph.aten import Blocks, aten, dtype_of, shape_of
from ..graph.emitter import Emitter
from ..graph.sizes import divide, is_same, numel
from ..match.permutes import Permute
from ..match.site import Gather, GatheredAlias, GatheredScales
from ..plan.strategy import DispatchTable, Strategy


def rewrite_gather(e: Emitter, m: Gather, strategy: Strategy | DispatchTable, site: str) -> dict[Node, Node]:
    """Emits the op; returns which node replaces which. Insertion point: behind every operand."""
    c = m.collective
    assert c.wait is not None
    shard = e.bits(c.input, m.dtype) if m.scaled is not None else e.cast(c.input, m.dtype)
    for turn in m.permutes:
        shard = e.permute(e.reshape(shard, turn.shard_shape), turn.dims)
    cols = m.cols if not m.shard_dim_is_last else m.blocks.inner
    if not shape_of(shard) or shape_of(shard)[-1] != cols:
        rows = divide(numel(shape_of(shard)), cols)
        assert rows is not None, "the match proved that a shard is whole rows"
        shard = e.reshape(shard, (rows, cols))
    operands = [e.operand(k.operand) for k in m.consumers]
    outer = 1 if m.shard_dim_is_last else e.size(m.blocks.outer)
    if m.scaled is not None:
        return _scaled(e, m, shard, operands, outer, strategy, site)
    op = e.call(
        torch.ops.ub_overlap.all_gather_matmul.default,
        shard,
        operands,
        [k.transpose_gathered for k in m.consumers],
        [k.transpose_out for k in m.consumers],
        outer,
        m.shard_dim_is_last,
        bool(m.kept_aliases),
        str(strategy),
        c.group,
        site,
        value_is=_gathered(e, m, shard),
    )
    replaced: dict[Node, Node] = {}
    outs = e.item(op, 1)
    for i, k in enumerate(m.consumers):
        node = k.compute.node
        value = e.reshape(e.item(outs, i), shape_of(node), old=node)
        if k.compute.bias is not None:
            value = e.call(aten.add.Tensor, value, k.compute.bias)
        replaced[node] = value
    if m.kept_aliases:
        gathered = e.item(op, 0)
        for root in m.kept_aliases:
            replaced[root] = _restore(e, m, gathered, root, m.permutes)
    return replaced


def _scaled(
    e: Emitter, m: Gather, shard: Node, operands: list[Node], outer: int | Node, strategy: Strategy | DispatchTable, site: str
) -> dict[Node, Node]:
    """The op for float8: scales go in, biases are added by the products, and the scales of kept rows come back."""
    products = [k.compute for k in m.consumers]
    scales = [p.scales for p in products if p.scales is not None]
    if m.scales is not None:
        shard_scale = e.reshape(m.scales.collective.input, (numel(shape_of(m.scales.collective.input)), 1))
    else:
        shard_scale = scales[0].lhs
    keep = bool(m.kept_aliases) or bool(m.scales and m.scales.kept_aliases)
    op = e.call(
        torch.ops.ub_overlap.all_gather_scaled_matmul.default, shard, shard_scale, operands, [s.rhs for s in scales],
        [p.bias for p in products], outer, keep, [dtype_of(p.node) for p in products], scales[0].fast, str(strategy),
        m.collective.group, site, value_is=_scaled_values(e, m, shard, keep),
    )  # fmt: skip
    outs = e.item(op, 2)
    replaced = {p.node: e.reshape(e.item(outs, i), shape_of(p.node), old=p.node) for i, p in enumerate(products)}
    if m.kept_aliases:
        gathered = e.item(op, 0)
        replaced.update({root: _restore(e, m, gathered, root, m.permutes) for root in m.kept_aliases})
    if m.scales is not None and m.scales.kept_aliases:
        gathered = e.item(op, 1)
        replaced.update({root: _restore(e, m.scales, gathered, root) for root in m.scales.kept_aliases})
    return replaced


def _scaled_values(
    e: Emitter, m: Gather, shard: Node, keep: bool
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]] | None:
    """The results for float8 where all sizes are static."""
    gathered = e.empty((m.rows, m.cols) if keep else (0,), dtype_of(shard), shard)
    scale = e.empty((m.rows, 1) if keep and m.scales is not None else (0,), torch.float32, shard)
    outs = [e.result(k.compute.shape, k.compute.node) for k in m.consumers]
    if gathered is None or scale is None or any(o is None for o in outs):
        return None
    return gathered, scale, outs  # type: ignore[return-value]


def _gathered(e: Emitter, m: Gather, shard: Node) -> tuple[torch.Tensor, list[torch.Tensor]] | None:
    """The op's results where all sizes are static."""
    gathered = e.empty((m.rows, m.cols) if m.kept_aliases else (0,), dtype_of(shard), shard)
    outs = [e.result(k.compute.shape, k.compute.node) for k in m.consumers]
    return None if gathered is None or any(o is None for o in outs) else (gathered, outs)  # type: ignore[return-value]


def _restore(e: Emitter, m: Gather | GatheredScales, gathered: Node, root: Node, permutes: tuple[Permute, ...] = ()) -> Node:
    """The value of the holder `root`, from `gathered`, which went through `permutes`."""
    held: GatheredAlias = m.aliases[root]
    shape = shape_of(root)
    value, here = gathered, m.blocks
    shared = 0
    while permutes[shared : shared + 1] == held.permutes[shared : shared + 1] and shared < len(permutes):
        shared += 1
    for turn in permutes[shared:][::-1]:
        value, here = (
            e.permute(e.reshape(_in_order(e, value, here, turn.blocks_after), turn.after), turn.inverse),
            turn.blocks_before,
        )
    for turn in held.permutes[shared:]:
        value, here = (
            e.permute(e.reshape(_in_order(e, value, here, turn.blocks_before), turn.before), turn.dims),
            turn.blocks_after,
        )
    value = _in_order(e, value, here, held.blocks)
    if held.is_transposed:
        value = e.reshape(value, held.matrix)  # type: ignore[arg-type]
        # Contiguous where the root was: its users may view it.
        value = e.permute(value, [1, 0]) if root.meta["val"].is_contiguous() else e.transpose(value)
    value = e.reshape(value, shape)
    return e.bits(value, held.dtype) if dtype_of(value).itemsize == 1 else e.cast(value, held.dtype)


def _in_order(e: Emitter, value: Node, here: Blocks, there: Blocks) -> Node:
    """Gathered elements in order `here`, put in order `there`, by way of the wait's own (shards one after the other)."""
    if is_same(here.outer, there.outer):
        return value
    if is_same(there.outer, 1):
        return e.permute(e.reshape(value, (here.outer, here.ranks, here.inner)), [1, 0, 2])
    value = _in_order(e, value, here, Blocks(1, here.ranks, here.outer * here.inner))
    return e.permute(e.reshape(value, (there.ranks, there.outer, there.inner)), [1, 0, 2])

"""all_gather -> matmuls becomes one op; who else read the gathered tensor reads the one the op keeps."""

from __future__ import annotations

import torch
from torch.fx import Node

from ..plan import Strategy
from ..sites.match import Gather, Holder
from ..sites.sizes import divide, product
from ..sites.values import aten, dtype_of, shape_of
from .emit import Emitter


def rewrite_gather(e: Emitter, m: Gather, strategy: Strategy, site: str) -> dict[Node, Node]:
    """Emits the op; returns which node replaces which. Insertion point: behind every operand."""
    c = m.collective
    assert c.wait is not None
    shard = e.cast(c.input, m.dtype)
    cols = m.cols if not m.last else m.blocks.inner
    if not shape_of(shard) or shape_of(shard)[-1] != cols:
        rows = divide(product(shape_of(shard)), cols)
        assert rows is not None, "the match proved that a shard is whole rows"
        shard = e.reshape(shard, (rows, cols))
    operands = [e.operand(k.operand) for k in m.consumers]
    outer = 1 if m.last else e.size(m.blocks.outer)
    op = e.call(
        torch.ops.ub_overlap.all_gather_matmul.default,
        shard,
        operands,
        [k.mode for k in m.consumers],
        outer,
        m.last,
        bool(m.roots),
        str(strategy),
        c.group,
        site,
        value_is=_values(e, m, shard),
    )
    replaced: dict[Node, Node] = {}
    outs = e.item(op, 1)
    for i, k in enumerate(m.consumers):
        node = k.product.node
        value = e.reshape(e.item(outs, i), shape_of(node), old=node)
        if k.product.bias is not None:
            value = e.call(aten.add.Tensor, value, k.product.bias)
        replaced[node] = value
    if m.roots:
        gathered = e.item(op, 0)
        for root in m.roots:
            replaced[root] = _restore(e, m, gathered, root)
    return replaced


def _values(e: Emitter, m: Gather, shard: Node) -> tuple[torch.Tensor, list[torch.Tensor]] | None:
    """The op's results where all sizes are static."""
    gathered = e.empty((m.rows, m.cols) if m.roots else (0,), dtype_of(shard), shard)
    outs = [e.result(k.product.shape, k.product.node) for k in m.consumers]
    return None if gathered is None or any(o is None for o in outs) else (gathered, outs)  # type: ignore[return-value]


def _restore(e: Emitter, m: Gather, gathered: Node, root: Node) -> Node:
    """The value of the holder `root`, from G."""
    held: Holder = m.holders[root]
    shape = shape_of(root)
    value = gathered
    if held.blocks.outer != m.blocks.outer:
        # `root` holds the shards one after the other (as the wait gives them), G in the order of the matmul.
        here, there = m.blocks, held.blocks
        value = e.reshape(value, (here.outer, here.ranks, here.inner))
        assert there.outer == 1
        value = e.call(aten.permute.default, value, [1, 0, 2])
        value = e.call(aten.clone.default, value, memory_format=torch.contiguous_format)
    if held.swapped:
        value = e.transpose(e.reshape(value, held.matrix))  # type: ignore[arg-type]
    return e.cast(e.reshape(value, shape), held.dtype)

"""Restore the value of a node that held gathered elements, from the gathered tensor that an op keeps."""

from __future__ import annotations

from torch.fx import Node

from ..graph.aten import ShardBlocks, dtype_of, shape_of
from ..graph.emitter import Emitter
from ..graph.sizes import as_sizes, is_same, squeezed
from ..match.permutes import Permute
from ..match.site import Gather, GatheredScales


def restore_alias(
    e: Emitter, m: Gather | GatheredScales, gathered: Node, node: Node, permutes: tuple[Permute, ...] = ()
) -> Node:
    """Emit the value of the alias `node`. `permutes`: those that `gathered` went through."""
    alias = m.aliases[node]
    shape = shape_of(node)
    value, blocks = gathered, m.blocks
    shared = 0
    while permutes[shared : shared + 1] == alias.permutes[shared : shared + 1] and shared < len(permutes):
        shared += 1
    for permute in permutes[shared:][::-1]:
        value = e.reshape(_reorder(e, value, blocks, permute.blocks_after), permute.after)
        value, blocks = e.permute(value, permute.inverse), permute.blocks_before
    for permute in alias.permutes[shared:]:
        value = e.reshape(_reorder(e, value, blocks, permute.blocks_before), permute.before)
        value, blocks = e.permute(value, permute.dims), permute.blocks_after
    value = _reorder(e, value, blocks, alias.blocks)
    if alias.is_transposed:
        value = e.reshape(value, alias.matrix)
        # Contiguous if the alias was: its users may view it.
        value = e.permute(value, [1, 0]) if node.meta["val"].is_contiguous() else e.transpose(value)
    value = e.reshape(value, shape)
    if _is_column_major(node) and not _is_column_major(value):  # a copy that the program made for a scaled matmul
        value = e.transpose(e.permute(value, [1, 0]))
    return e.bitcast(value, alias.dtype) if dtype_of(value).itemsize == 1 else e.cast(value, alias.dtype)


def _reorder(e: Emitter, value: Node, before: ShardBlocks, after: ShardBlocks) -> Node:
    """Move gathered elements from the order `before` to `after`, by way of the wait's order (one shard after the other)."""
    if is_same(before.outer, after.outer):
        return value
    if is_same(after.outer, 1):
        return e.permute(e.reshape(value, (before.outer, before.ranks, before.inner)), [1, 0, 2])
    value = _reorder(e, value, before, ShardBlocks(1, before.ranks, before.outer * before.inner))
    return e.permute(e.reshape(value, (after.ranks, after.outer, after.inner)), [1, 0, 2])


def _is_column_major(node: Node) -> bool:
    """Return whether `node` is a matrix whose columns are contiguous and whose rows are not."""
    shape, strides = shape_of(node), as_sizes(node.meta["val"].stride())
    return len(squeezed(shape)) == len(shape) == 2 and is_same(strides[0], 1) and is_same(strides[1], shape[0])

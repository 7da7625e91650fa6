"""Permutes of more than two dims between a collective and a matmul: [S, B, D] models with [B, S, D] collectives.

A permute moves the sharded dim as a whole, so it commutes with the collective. A gather of permuted shards is the permuted
gather, and a scatter of a permuted sum is the permuted scatter. The site then permutes the shard, not the whole tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from ..graph.aten import ShardBlocks, aten, node_arg, permutation, shape_of
from ..graph.sizes import Size, divide, is_same, numel


@dataclass(frozen=True, slots=True)
class Permute:
    """A permute by `dims` of a tensor of shape `before`, whose dim `axis` is sharded over `ranks`."""

    before: tuple[Size, ...]
    dims: tuple[int, ...]
    axis: int
    ranks: int

    @property
    def after(self) -> tuple[Size, ...]:
        """The shape after the permute."""
        return tuple(self.before[d] for d in self.dims)

    @property
    def shard_shape(self) -> tuple[Size, ...]:
        """The shape of a shard before the permute."""
        part = divide(self.before[self.axis], self.ranks)
        assert part is not None
        return (*self.before[: self.axis], part, *self.before[self.axis + 1 :])

    @property
    def inverse(self) -> list[int]:
        """The inverse permutation."""
        return [self.dims.index(d) for d in range(len(self.dims))]

    @property
    def blocks_before(self) -> ShardBlocks:
        """The layout of the shards before the permute."""
        return _blocks(self.before, self.axis, self.ranks)

    @property
    def blocks_after(self) -> ShardBlocks:
        """The layout of the shards after the permute."""
        return _blocks(self.after, self.dims.index(self.axis), self.ranks)


def permute_of_input(node: Node, blocks: ShardBlocks) -> Permute | None:
    """Return the permute that `node` applies to an input with `blocks`, or None."""
    if not _is_permute(node):
        return None
    return _permute(node, _sharded_dim(shape_of(node_arg(node)), blocks), blocks.ranks)


def permute_to_output(node: Node, blocks: ShardBlocks) -> Permute | None:
    """Return the permute whose output `node` has `blocks`, or None."""
    if not _is_permute(node):
        return None
    axis = _sharded_dim(shape_of(node), blocks)
    return _permute(node, None if axis is None else permutation(node)[axis], blocks.ranks)


def _is_permute(node: Node) -> bool:
    return node.target in (aten.permute.default, aten.transpose.int)


def _permute(node: Node, axis: int | None, ranks: int) -> Permute | None:
    before = shape_of(node_arg(node))
    if axis is None or divide(before[axis], ranks) is None:
        return None
    return Permute(before, tuple(permutation(node)), axis, ranks)


def _blocks(shape: tuple[Size, ...], axis: int, ranks: int) -> ShardBlocks:
    part = divide(shape[axis], ranks)
    assert part is not None
    return ShardBlocks(numel(shape[:axis]), ranks, part * numel(shape[axis + 1 :]))


def _sharded_dim(shape: tuple[Size, ...], blocks: ShardBlocks) -> int | None:
    """The dim of `shape` that `blocks` shards, if it is exactly one."""
    for axis, dim in enumerate(shape):
        if divide(dim, blocks.ranks) is None or not is_same(numel(shape[:axis]), blocks.outer):
            continue
        if is_same(_blocks(shape, axis, blocks.ranks).inner, blocks.inner):
            return axis
    return None

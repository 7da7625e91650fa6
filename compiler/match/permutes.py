"""Permutes of more than two dims on the way between collective and matmul: [S, B, D] models beside [B, S, D] collectives.

A permute moves the dealt-out dim whole, so it commutes with the collective: a gather of permuted shards is the permuted gather,
and a scatter of a permuted sum is the permuted scatter. The site then permutes the shard instead of the whole tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from ..graph.aten import Blocks, aten, node_arg, permutation, shape_of
from ..graph.sizes import Size, divide, is_same, numel


@dataclass(frozen=True, slots=True)
class Permute:
    """`dims` permutes a tensor of shape `before` whose dim `axis` is dealt out over `ranks`."""

    before: tuple[Size, ...]
    dims: tuple[int, ...]
    axis: int
    ranks: int

    @property
    def after(self) -> tuple[Size, ...]:
        return tuple(self.before[d] for d in self.dims)

    @property
    def shard(self) -> tuple[Size, ...]:
        """Shape of a shard before the permute."""
        part = divide(self.before[self.axis], self.ranks)
        assert part is not None
        return (*self.before[: self.axis], part, *self.before[self.axis + 1 :])

    @property
    def back(self) -> list[int]:
        """The inverse permutation."""
        return [self.dims.index(d) for d in range(len(self.dims))]

    @property
    def blocks_before(self) -> Blocks:
        return _blocks(self.before, self.axis, self.ranks)

    @property
    def blocks_after(self) -> Blocks:
        return _blocks(self.after, self.dims.index(self.axis), self.ranks)


def _blocks(shape: tuple[Size, ...], axis: int, ranks: int) -> Blocks:
    part = divide(shape[axis], ranks)
    assert part is not None
    return Blocks(numel(shape[:axis]), ranks, part * numel(shape[axis + 1 :]))


def _axis(shape: tuple[Size, ...], blocks: Blocks) -> int | None:
    """The dim of `shape` that `blocks` deals out, if it is one dim and whole."""
    for axis, dim in enumerate(shape):
        if divide(dim, blocks.ranks) is None or not is_same(numel(shape[:axis]), blocks.outer):
            continue
        if is_same(_blocks(shape, axis, blocks.ranks).inner, blocks.inner):
            return axis
    return None


def as_permute(node: Node, blocks: Blocks, reads: bool) -> Permute | None:
    """`node` as a Turn if it is a permute. `blocks` are those of its input, or with reads=False those of its output."""
    if node.target not in (aten.permute.default, aten.transpose.int):
        return None
    before, dims = shape_of(node_arg(node)), tuple(permutation(node))
    if reads:
        axis = _axis(before, blocks)
    else:
        found = _axis(shape_of(node), blocks)
        axis = None if found is None else dims[found]
    if axis is None or divide(before[axis], blocks.ranks) is None:
        return None
    return Permute(before, dims, axis, blocks.ranks)

"""The backward walk from the input of a reduction, over views and scalings, to the root of the sum that is reduced."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.fx import Node

from ..graph.aten import (
    PADS,
    Effect,
    ElementEffect,
    Scaling,
    ShardBlocks,
    aten,
    constant_scaling,
    dim_of,
    dtype_of,
    element_effect,
    match_regroup,
    node_arg,
    pieces_of,
    shape_of,
)
from ..graph.sizes import Size, is_same, is_same_shape, numel, squeezed
from ..plan.reasons import Reason
from .collectives import Collective
from .permutes import Permute, permute_to_output
from .site import Miss


@dataclass(slots=True)
class ViewChain:
    """The nodes between the root of a sum and the collective, nearest to the collective first."""

    root: Node
    blocks: ShardBlocks
    """The layout of the shards in the root."""
    matrix: tuple[Size, ...] = ()
    """(rows, cols) if the root is the transpose of what the collective reads, else ()."""
    scalings: list[Scaling] = field(default_factory=list)
    """(op, constant) pairs, last applied first."""
    nodes: list[Node] = field(default_factory=list)
    permutes: list[Permute] = field(default_factory=list)
    """Last applied first."""

    @classmethod
    def at_input(cls, c: Collective) -> ViewChain:
        """Return the empty chain in front of `c`."""
        total = numel(shape_of(c.input))
        inner = total // c.ranks if isinstance(total, int) else total / c.ranks
        return cls(c.input, ShardBlocks(1, c.ranks, inner))

    def extend(self, can_regroup: bool) -> Node | Miss | None:
        """Move the root over one node of the chain. Return the new root, None at the sum, or the reason to stop.

        `can_regroup`: the collective scatters, so a cat may reorder its shards.
        """
        node = self.root
        effect = element_effect(node)
        if effect is not None:
            if (miss := self._pass_effect(node, effect)) is not None:
                return miss
            self.nodes.append(node)
            return effect.source
        if node.target is aten.cat.default and can_regroup:
            return self._pass_regroup(node)
        if not self.matrix and (permute := permute_to_output(node, self.blocks)) is not None:
            self.blocks = permute.blocks_before
            self.permutes.append(permute)
        elif scaling := constant_scaling(node):
            self.scalings.append(scaling)
        else:
            return None
        self.nodes.append(node)
        return node_arg(node)

    def _pass_effect(self, node: Node, effect: ElementEffect) -> Miss | None:
        before = effect.source
        if effect.kind is Effect.CAST:
            if dtype_of(before).itemsize > dtype_of(node).itemsize:
                detail = f"{node.name} narrows {dtype_of(before)} to {dtype_of(node)} before the sum"
                return Miss(Reason.CAST_IN_BETWEEN, detail)
        elif effect.kind is Effect.TRANSPOSE:
            matrix = squeezed(shape_of(node))
            if self.matrix and not is_same_shape(matrix, self.matrix[::-1]):
                return Miss(Reason.LAYOUT, f"{node.name} permutes a reshaped transpose")
            self.matrix = () if self.matrix else matrix
        elif self.matrix and not is_same_shape(squeezed(shape_of(before)), self.matrix[::-1]):
            return Miss(Reason.LAYOUT, f"{node.name} reshapes a transposed matmul")
        return None

    def _pass_regroup(self, cat: Node) -> Node | Miss:
        """Pass a cat that puts equal parts of one dim one after the other, as reduce_scatter needs them."""
        pieces, ranks = pieces_of(cat), self.blocks.ranks
        group = match_regroup(pieces, ranks)
        if group is None and any(p.target in PADS for p in pieces):
            return Miss(Reason.UNEVEN_SHARDS, f"{cat.name} pads shards to one size")
        if group is None:
            return Miss(Reason.SHARD_ORDER, f"{cat.name} is not a plain scatter: it permutes, repeats, drops or pads shards")
        source, axis = group
        dim, piece = dim_of(cat), shape_of(pieces[0])
        if (
            self.matrix
            or not is_same(numel(piece[:dim]), self.blocks.outer)
            or not is_same(numel(piece[dim:]), self.blocks.inner)
        ):
            return Miss(Reason.LAYOUT, f"{cat.name} cuts shards apart")
        self.blocks = ShardBlocks(numel(piece[:axis]), ranks, numel(piece[axis:]))
        self.nodes += [cat, *pieces, *dict.fromkeys(node_arg(p) for p in pieces if node_arg(p) is not source)]
        return source


def follow_view_chain(c: Collective, can_regroup: bool) -> ViewChain | Miss:
    """Walk from the input of `c` to the root of the sum. Return the reason if the walk ends at a node that is not allowed."""
    chain = ViewChain.at_input(c)
    while (root := chain.extend(can_regroup)) is not None:
        if isinstance(root, Miss):
            return root
        chain.root = root
    return chain


def follow_regroup(c: Collective, can_regroup: bool) -> ViewChain:
    """Walk from the input of `c` over views, and over cats that regroup shards, to the first node that does more than that.

    All nodes of the chain compute from its root alone: they can be copied for another root of its shape.
    """
    chain = ViewChain.at_input(c)
    while True:
        step = element_effect(chain.root)
        is_view = step is not None and step.kind is Effect.SAME and step.source is chain.root.args[0]
        is_regroup = (
            can_regroup and chain.root.target is aten.cat.default and not any(map(element_effect, pieces_of(chain.root)))
        )
        root = chain.extend(can_regroup) if is_view or is_regroup else None
        if root is None or isinstance(root, Miss):
            return chain
        chain.root = root

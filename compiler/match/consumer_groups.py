"""Groups of matmuls that read a gathered matrix in the same layout. One op can serve one group."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch.fx import Node

from ..graph.matmul import find_indivisible_size
from ..graph.sizes import Size, divide
from ..plan.reasons import Reason
from .gather_walk import GatherWalk, MatmulUse
from .permutes import Permute
from .row_scales import find_row_scale_gather, is_same_value
from .site import Consumer, Miss


@dataclass(frozen=True, slots=True)
class GatheredLayout:
    """How a consumer reads the gathered matrix [rows, cols]."""

    outer: Size
    shard_dim_is_last: bool
    rows: Size
    cols: Size
    dtype: torch.dtype
    permutes: tuple[Permute, ...]
    scale: object
    """The scales of its float8 rows; () for 16 bits."""


class ConsumerGroups:
    """The uses of a gather by layout. A use without a layout goes to `kept` and `blocked` of the walk."""

    def __init__(self, walk: GatherWalk) -> None:
        self.uses: dict[GatheredLayout, list[MatmulUse]] = defaultdict(list)
        self._walk = walk
        self._tensor_scales: list[Node] = []
        for use in walk.uses:
            self._add(use)

    def take_largest(self) -> tuple[GatheredLayout, list[MatmulUse]]:
        """Return the largest group. The walk keeps the aliases that the other groups read."""
        largest = max(self.uses, key=lambda layout: len(self.uses[layout]))
        for layout, uses in self.uses.items():
            if layout != largest:
                self._walk.kept += [u.node for u in uses]
        return largest, self.uses[largest]

    def _add(self, use: MatmulUse) -> None:
        matmul, aliases = use.consumer.compute.node, self._walk.aliases
        if use.consumer.operand.node in aliases:
            self._walk.blocked.append(
                Miss(Reason.DEPENDENT_OPERAND, f"{matmul.name} multiplies the gathered tensor with itself")
            )
            self._walk.kept += [n for n in matmul.all_input_nodes if n in aliases]
            return
        layout = self._layout(use)
        if isinstance(layout, Miss):
            self._walk.blocked.append(layout)
            self._walk.kept.append(use.node)
        else:
            self.uses[layout].append(use)

    def _layout(self, use: MatmulUse) -> GatheredLayout | Miss:
        alias, (rows, cols) = use.alias, _gathered_matrix(use.consumer)
        if alias.blocks.rows(rows, cols) is not None:
            shard_dim_is_last = False
        elif alias.blocks.shard_dim_is_last(rows, cols):
            shard_dim_is_last = True
        else:
            name = use.consumer.compute.node.name
            return Miss(Reason.LAYOUT, f"{name}: a shard is not a block of its rows or columns")
        scale = self._scale(use, shard_dim_is_last)
        if isinstance(scale, Miss):
            return scale
        return GatheredLayout(alias.blocks.outer, shard_dim_is_last, rows, cols, alias.dtype, alias.permutes, scale)

    def _scale(self, use: MatmulUse, shard_dim_is_last: bool) -> object:
        """The value that differs between consumers of differently scaled gathers; () for 16 bits."""
        matmul = use.consumer.compute
        scales, name = matmul.scales, matmul.node.name
        if scales is None:
            return ()
        if shard_dim_is_last:
            return Miss(Reason.SCALED_FORM, f"{name} sums over shards of its inner dim")
        if indivisible := find_indivisible_size(matmul):
            return Miss(Reason.SIZES_NOT_16, f"{name}: {indivisible}")
        if not scales.rows:
            return self._first_of_value(scales.lhs), scales.fast
        rows_per_block = divide(use.alias.blocks.inner, matmul.lhs.cols)
        gather = find_row_scale_gather(self._walk.collective, use.alias, rows_per_block, scales.lhs)
        if gather is None:
            return Miss(Reason.SCALED_FORM, f"{name}: the scales of its rows are not gathered like the rows")
        return gather.node, scales.fast

    def _first_of_value(self, scale: Node) -> Node:
        """The first scale of a tensor that is the same computation as `scale`."""
        for known in self._tensor_scales:
            if is_same_value(known, scale):
                return known
        self._tensor_scales.append(scale)
        return scale


def _gathered_matrix(consumer: Consumer) -> tuple[Size, Size]:
    """[rows, cols] of the gathered matrix G as `consumer` reads it."""
    matmul = consumer.compute
    gathered = matmul.rhs if consumer.transpose_out else matmul.lhs
    is_transposed = consumer.transpose_gathered != consumer.transpose_out
    return (gathered.cols, gathered.rows) if is_transposed else (gathered.rows, gathered.cols)

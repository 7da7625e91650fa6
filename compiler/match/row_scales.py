"""The gathers of the scales of gathered float8 rows.

    scale of a tensor   []                                        the same on all ranks, not communicated
    scales of rows      [.., m, 1] -> all_gather -> wait -> (view | split -> cat)* -> [M, 1]

The gather of row scales belongs to the site that gathers the rows. It has no matmul of its own.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from ..graph.aten import CUTS, aten, c10d, element_effect, node_arg, pieces_of, readers
from ..graph.matmul import Matmul
from ..graph.sizes import is_same
from .collectives import Collective, read_collective
from .gather_walk import GatherWalk
from .site import GatheredAlias, GatheredScales

_SEARCH_DEPTH = 12


def is_same_value(a: object, b: object, depth: int = _SEARCH_DEPTH) -> bool:
    """Return whether two nodes are the same computation of the same nodes. Graphs without CSE repeat scales."""
    if a is b:
        return True
    if not isinstance(a, Node) or not isinstance(b, Node):
        return type(a) is type(b) and a == b
    if depth == 0 or a.op != "call_function" or a.target != b.target or a.op != b.op or a.kwargs != b.kwargs:
        return False
    return len(a.args) == len(b.args) and all(is_same_value(x, y, depth - 1) for x, y in zip(a.args, b.args, strict=True))


def find_row_scale_gather(rows: Collective, alias: GatheredAlias, rows_per_block: object, scale: Node) -> Collective | None:
    """Return the all_gather of `scale` [M, 1] if it is sharded like the rows that it scales, over the same group.

    `rows`: the all_gather of the rows. `alias`: their layout. `rows_per_block`: rows of one shard in one block.
    """
    c = _find_gather(scale)
    if c is None or c.wait is None or c.group != rows.group or c.ranks != rows.ranks or alias.permutes:
        return None
    own = GatherWalk(c).aliases.get(scale)
    if own is None or own.is_transposed or own.permutes or own.dtype is not torch.float32:
        return None
    same_blocks = is_same(own.blocks.outer, alias.blocks.outer) and is_same(own.blocks.inner, rows_per_block)
    return c if same_blocks else None


def gathered_scales(matmuls: list[Matmul]) -> GatheredScales | None:
    """Return the gather of the row scales of `matmuls`, which share their left operand; None without row scales."""
    scales = matmuls[0].scales
    if scales is None or not scales.rows:
        return None
    c = _find_gather(scales.lhs)
    assert c is not None, "find_row_scale_gather returned it"
    walk = GatherWalk(c)
    inside = {p.node for p in matmuls} | walk.aliases.keys() | walk.cuts.keys()
    kept = tuple(n for n in walk.aliases if any(u not in inside for u in readers(n)))
    return GatheredScales(c, walk.aliases[scales.lhs].blocks, walk.aliases, kept, tuple(walk.cuts))


def _find_gather(scale: Node) -> Collective | None:
    """The all_gather that a scale comes from, through nodes that only move elements."""
    node = scale
    while True:
        if node.target is c10d.all_gather_into_tensor.default:
            return read_collective(node)
        effect = element_effect(node)
        if effect is not None:
            node = effect.source
        elif node.target is aten.cat.default and pieces_of(node):
            node = pieces_of(node)[0]
        elif node.target in (c10d.wait_tensor.default, operator.getitem, aten.slice.Tensor, *CUTS):
            node = node_arg(node)
        else:
            return None

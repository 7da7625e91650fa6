"""The scales of float8 operands, as far as they travel.

    tensor   scale []                                               the same on all ranks: nothing travels
    rows     scale [.., m, 1] -> all_gather -> wait -> (view | split -> cat)* -> [M, 1]     beside the rows' own gather

A gather of row scales belongs to the site of the rows: it has no matmul of its own, and rows are of no use without it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch.fx import Graph, Node

from ub_overlap.runtime.fp8.numerics import FLOAT8

from ..graph.aten import CASTS, CUTS, aten, c10d, dtype_of, element_effect, node_arg, pieces_of, shape_of, tensor_of
from ..graph.sizes import is_same, numel
from ..joint.joint_decision import joint_decision, record_decision
from .collectives import Collective, Op, read_collective
from .site import GatheredAlias

_CLAMPS = {aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default, aten.minimum.default, aten.maximum.default}
Walk = Callable[[Collective], dict[Node, GatheredAlias]]
"""An all_gather -> who carries its elements, and how."""


def is_same_value(a: object, b: object, depth: int = 12) -> bool:
    """Are two nodes the same computation of the same nodes? (Graphs that went through no CSE repeat scales.)"""
    if a is b:
        return True
    if not isinstance(a, Node) or not isinstance(b, Node):
        return type(a) is type(b) and a == b
    if depth == 0 or a.op != "call_function" or a.target != b.target or a.op != b.op or a.kwargs != b.kwargs:
        return False
    return len(a.args) == len(b.args) and all(is_same_value(x, y, depth - 1) for x, y in zip(a.args, b.args, strict=True))


def find_scale_gather(scale: Node) -> Collective | None:
    """The all_gather that a scale comes from, through what only moves its elements."""
    node = scale
    while True:
        if node.target is c10d.all_gather_into_tensor.default:
            return read_collective(node)
        step = element_effect(node)
        if step is not None:
            node = step.source
        elif node.target is aten.cat.default and pieces_of(node):
            node = pieces_of(node)[0]
        elif node.target in (c10d.wait_tensor.default, operator.getitem, aten.slice.Tensor, *CUTS):
            node = node_arg(node)
        else:
            return None


def find_row_scale_gather(
    payload: Collective, held: GatheredAlias, per_block: object, scale: Node, walk: Walk
) -> Collective | None:
    """The all_gather of the scales [M, 1] of gathered rows: dealt out like the rows, over the same group. None where `scale`
    is something else. `held`: how the rows lie; `per_block`: rows of one shard in one block."""
    c = find_scale_gather(scale)
    if c is None or c.wait is None or c.group != payload.group or c.ranks != payload.ranks or held.permutes:
        return None
    mine = walk(c).get(scale)
    if mine is None or mine.swapped or mine.permutes or mine.dtype is not torch.float32:
        return None
    blocks = mine.blocks
    return c if is_same(blocks.outer, held.blocks.outer) and is_same(blocks.inner, per_block) else None


def mark_amax_reductions(graph: Graph) -> None:
    """Notes on a joint graph which all_reduces carry scales: in its halves a reader may be in the other one."""
    for node in graph.find_nodes(op="call_function", target=c10d.all_reduce.default):
        if is_amax_reduction(read_collective(node)):
            record_decision(node, carries_scales=True)


def is_amax_reduction(c: Collective) -> bool:
    """Does `c` bring together what float8 tensors are scaled by: the largest of magnitudes, read by scales and casts?"""
    if joint_decision(c.node).carries_scales:
        return True
    if c.op is not Op.ALL_REDUCE or c.reduce_op != "max" or c.wait is None:
        return False
    node = c.input
    while (step := element_effect(node)) is not None:
        node = step.source
    return node.target in (aten.amax.default, aten.max.default) and _scales_something(c.wait)


def _scales_something(magnitude: Node) -> bool:
    """Does a value made of `magnitude` alone scale a float8 product, or what is cast to float8? (The largest logit that a
    softmax over ranks subtracts does neither.)"""
    seen, todo = {magnitude}, [magnitude]
    size = numel(shape_of(magnitude))
    while todo:
        node = todo.pop()
        for user in node.users:
            if user.target is aten._scaled_mm.default:
                return True
            if user in seen or tensor_of(user) is None:
                continue
            seen.add(user)
            if is_same(numel(shape_of(user)), size):
                todo.append(user)
            elif user.target in (aten.mul.Tensor, aten.div.Tensor) and _narrowed(user):
                return True
    return False


def _narrowed(node: Node, depth: int = 4) -> bool:
    """Is `node` cast to float8, clamped before or not?"""
    for user in node.users:
        if tensor_of(user) is None:
            continue
        if dtype_of(user) in FLOAT8:
            return True
        if depth and (user.target in _CLAMPS or user.target in CASTS) and _narrowed(user, depth - 1):
            return True
    return False

"""Trace elements back through views, transposes, casts, cats and gathers to where they come from."""

from __future__ import annotations

from collections.abc import Container

from torch.fx import Node

from ..graph.aten import (
    CUTS,
    Effect,
    aten,
    c10d,
    dim_of,
    dtype_of,
    element_effect,
    match_regroup,
    node_arg,
    pieces_of,
    shape_of,
)
from ..graph.matmul import FLOATS
from ..graph.sizes import is_same, is_same_shape

Axis = int | None
"""The dim that a matmul sums over: -1 (last) or -2 (second to last). Each line along it has a scale. None: one scale in all."""


def element_source(node: Node) -> Node | None:
    """Return the node whose elements `node` passes on, or None where `node` computes new ones."""
    if node.target in (c10d.wait_tensor.default, c10d.all_gather_into_tensor.default):
        return node_arg(node)
    if node.target is aten.cat.default:
        pieces = pieces_of(node)
        regrouped = match_regroup(pieces, len(pieces))
        return regrouped[0] if regrouped is not None else None
    step = element_effect(node)
    if step is None or dtype_of(step.source) not in FLOATS:
        return None
    return step.source


def find_origin(node: Node) -> Node:
    """Return the node that computes the elements of `node`, or the graph input that holds them."""
    while (previous := element_source(node)) is not None:
        node = previous
    return node


def carries_elements(user: Node, node: Node, carriers: Container[Node], exact: bool) -> bool:
    """Return whether `user` holds elements of `node`, one of `carriers`: cut, joined, viewed or transposed.

    `exact`: on this rank and in this dtype. Otherwise casts and gathers carry elements too.
    """
    if user.target in CUTS or node.target in CUTS or user.target is aten.slice.Tensor:
        return True
    if user.target is aten.cat.default:
        source = element_source(user)
        return source is not None and source in carriers
    if not exact:
        return element_source(user) is node
    step = element_effect(user)
    return step is not None and step.source is node and step.kind in (Effect.SAME, Effect.TRANSPOSE)


def step_to_source(node: Node, axis: Axis) -> tuple[Node, Axis] | None:
    """Go one step towards the origin: return (previous node, the axis there), or None where a line along `axis` is split."""
    if node.target is c10d.wait_tensor.default:
        gather = node_arg(node)
        if gather.target is not c10d.all_gather_into_tensor.default:
            return None
        # Shards are concatenated in the first dim: a line along it crosses them.
        is_unsplit = axis is None or (axis == -1 and len(shape_of(gather)) > 1)
        return (node_arg(gather), axis) if is_unsplit else None
    previous = element_source(node)
    if previous is None or axis is None:
        return None if previous is None else (previous, axis)
    if node.target is aten.cat.default:
        pieces = pieces_of(node)
        regrouped = match_regroup(pieces, len(pieces))
        last = len(shape_of(node)) - 1
        is_unsplit = regrouped is not None and axis == -1 and last not in (regrouped[1], dim_of(node))
        return (previous, axis) if is_unsplit else None
    step = element_effect(node)
    assert step is not None, "element_source() handles gathers, cats and effects"
    if step.kind is Effect.TRANSPOSE:
        return (previous, -3 - axis) if len(shape_of(node)) == len(shape_of(previous)) == 2 else None
    before, after = shape_of(previous), shape_of(node)
    if axis == -1:
        return (previous, axis) if before and after and is_same(before[-1], after[-1]) else None
    return (previous, axis) if len(before) == len(after) == 2 and is_same_shape(before, after) else None

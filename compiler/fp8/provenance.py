"""Where the elements of a value come from: back through views, transposes, casts and gathers."""

from __future__ import annotations

from torch.fx import Node

from ..graph.aten import Effect, aten, c10d, dim_of, dtype_of, element_effect, match_regroup, node_arg, pieces_of, shape_of
from ..graph.matmul import FLOATS
from ..graph.sizes import is_same, is_same_shape

Axis = int | None
"""Which dim a product sums over, as -1 (the last) or -2 (the one before): each line along it has a scale. None: one for all."""


def before(node: Node) -> Node | None:
    """The node whose elements `node` hands on, or None where it computes."""
    if node.target in (c10d.wait_tensor.default, c10d.all_gather_into_tensor.default):
        return node_arg(node)
    if node.target is aten.cat.default:
        pieces = pieces_of(node)
        whole = match_regroup(pieces, len(pieces))
        return whole[0] if whole is not None else None
    step = element_effect(node)
    if step is None or dtype_of(step.source) not in FLOATS:
        return None
    return step.source


def origin(node: Node) -> Node:
    """The node that computed the elements, or the graph's input that brought them."""
    while (found := before(node)) is not None:
        node = found
    return node


def step_back(node: Node, axis: Axis) -> tuple[Node, Axis] | None:
    """One step towards the origin that keeps the lines along `axis` whole: (the node before, the axis there). Else None."""
    if node.target is c10d.wait_tensor.default:
        gather = node_arg(node)
        if gather.target is not c10d.all_gather_into_tensor.default:
            return None
        # Shards follow each other in the first dim: a line along it would cross them.
        whole = axis is None or (axis == -1 and len(shape_of(gather)) > 1)
        return (node_arg(gather), axis) if whole else None
    found = before(node)
    if found is None or axis is None:
        return None if found is None else (found, axis)
    if node.target is aten.cat.default:
        pieces = pieces_of(node)
        cut = match_regroup(pieces, len(pieces))
        last = len(shape_of(node)) - 1
        return (found, axis) if cut is not None and axis == -1 and last not in (cut[1], dim_of(node)) else None
    step = element_effect(node)
    assert step is not None, "before() knows gathers, cats and effects"
    if step.effect is Effect.SWAP:
        return (found, -3 - axis) if len(shape_of(node)) == len(shape_of(found)) == 2 else None
    a, b = shape_of(found), shape_of(node)
    if axis == -1:
        return (found, axis) if a and b and is_same(a[-1], b[-1]) else None
    return (found, axis) if len(a) == len(b) == 2 and is_same_shape(a, b) else None

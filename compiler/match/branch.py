"""The branch behind a reduction: what is added to the residual.

    reduced -> [+ bias of the linear layer] -> [norm] -> [* constant] -> [+ another tensor]       views anywhere

Norms stand in front of the residual in Gemma 2 and 3, GLM 4 and OLMo 2; Granite has the constant. Qwen 2 MoE adds the gated
result of a shared expert. Each step rounds to the type of the reduced tensor, and has no other reader.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch.fx import Node

from ..graph.aten import DIVISIONS, Effect, aten, constant_scaling, dtype_of, element_effect, readers, shape_of
from ..graph.sizes import is_same, is_same_shape, numel
from .collectives import Collective
from .norm import Norm, find_norm, fits_columns

MOST_ROW = 8 * 512 * 16
"""Bytes of a row with which the op can do more than add (csrc/core/fused_collective.h)."""


@dataclass(frozen=True, slots=True)
class Branch:
    """Steps on a reduced tensor. `out`: the node with the result. `nodes`: all nodes of the steps, with views."""

    out: Node
    nodes: tuple[Node, ...] = ()
    linear_bias: Node | None = None
    norm: Norm | None = None
    factor: float = 1.0
    addend: Node | None = None


def find_branch(c: Collective, reduced: Node) -> Branch:
    """Return the longest branch of `reduced` without an addend: the first tensor that is added may be the residual."""
    at, taken = reduced, list[Node]()
    linear_bias: Node | None = None
    norm: Norm | None = None
    factor = 1.0
    while True:
        at, views = follow_views(at)
        taken += views
        following = readers(at)
        if not has_rows_of(c, at):
            break
        if norm is None and factor == 1 and (found := find_norm(at)) is not None:
            if found.epsilon < 0 or not {*following} <= {*found.nodes}:
                break
            norm = found
            taken += norm.nodes
            at = norm.out
            continue
        if len(following) != 1:
            break
        (node,) = following
        if linear_bias is None and norm is None and factor == 1 and (vector := _added_vector(node, at)):
            linear_bias = vector
        elif factor == 1 and (constant := _constant_factor(node, at)) is not None:
            factor = constant
        else:
            break
        taken.append(node)
        at = node
    return Branch(at, tuple(taken), linear_bias, norm, factor)


def follow_views(node: Node) -> tuple[Node, list[Node]]:
    """Return the last of the views of `node` that are read by nothing but the next one, and all of them."""
    views = list[Node]()
    while len(readers(node)) == 1:
        (view,) = readers(node)
        effect = element_effect(view)
        if effect is None or effect.kind is not Effect.SAME or effect.source is not node:
            break
        views.append(view)
        node = view
    return node, views


def has_rows_of(c: Collective, value: Node) -> bool:
    """Return whether the rows of `value` are those of the collective, and of at most MOST_ROW bytes."""
    shape, sent = shape_of(value), shape_of(c.input)
    if not shape or not sent or c.wait is None:
        return False
    same = is_same(sent[-1], shape[-1]) and is_same(numel(shape), numel(shape_of(c.wait)))
    bytes_of_row = sent[-1] * dtype_of(value).itemsize
    return same and isinstance(bytes_of_row, int) and bytes_of_row <= MOST_ROW


def _added_vector(node: Node, at: Node) -> Node | None:
    """Return the vector [cols] of the type of `at` that is added to it."""
    if node.target is not aten.add.Tensor or node.kwargs.get("alpha", 1) != 1 or len(node.args) != 2 or len(shape_of(at)) < 2:
        return None
    others = [a for a in node.args if a is not at]
    is_vector = len(others) == 1 and isinstance(others[0], Node) and fits_columns(at, others[0])
    keeps = is_same_shape(shape_of(node), shape_of(at)) and dtype_of(node) == dtype_of(at)
    return others[0] if is_vector and keeps else None  # type: ignore[return-value]


def _constant_factor(node: Node, at: Node) -> float | None:
    """Return the constant that `at` is multiplied by, None where there is none, or where the product rounds otherwise."""
    if (scaling := constant_scaling(node)) is None or node.args[0] is not at or dtype_of(node) != dtype_of(at):
        return None
    op, constant = scaling
    if op not in DIVISIONS:
        return float(constant)
    return 1 / constant if abs(math.frexp(constant)[0]) == 0.5 else None  # the inverse of a power of two is exact

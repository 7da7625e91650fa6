"""The reason why a reduction has no matmul to overlap with."""

from __future__ import annotations

from torch.fx import Node

from ..graph.aten import PADS, SCALINGS, Effect, aten, element_effect, tensor_of
from ..graph.matmul import comes_from_matmul, is_matmul
from ..plan.reasons import Reason
from .site import Miss
from .sum_terms import ADDS, SUBTRACTIONS

_CUTS = (*PADS, aten.slice_scatter.default, aten.slice_backward.default, aten.slice.Tensor)
_SUMMAND_LIMIT = 64
"""Summands of a sum that are examined for the reason. Residual streams are sums of unlimited length."""


def explain_no_term(root: Node) -> Miss:
    """Return the reason why the root of a sum has no term."""
    near = [n for n in root.all_input_nodes if comes_from_matmul(n)]
    if is_matmul(root):
        return Miss(Reason.LAYOUT, f"{root.name} is a batched matmul")
    if root.target in _CUTS:
        return Miss(Reason.UNEVEN_SHARDS, f"{root.name} pads or cuts the matmul's result before it is scattered")
    if (scaling := find_scaling(root)) is not None:
        return Miss(Reason.SCALE_NOT_CONSTANT, f"{scaling.name} scales the matmul's result by a tensor")
    if near and root.target in (aten.permute.default, aten.transpose.int):
        return Miss(Reason.LAYOUT, f"{root.name} mixes the scattered dim with others")
    is_sum = root.target in (*ADDS, *SUBTRACTIONS) and len(root.all_input_nodes) == 2
    if is_sum and (cast := next(filter(None, map(_find_cast, near)), None)) is not None:
        return Miss(Reason.CAST_IN_BETWEEN, f"{cast.name} casts the matmul's result, a summand of {root.name}")
    if near and tensor_of(root) is not None:
        return Miss(Reason.NON_LINEAR, f"{root.name} ({root.target}) does not commute with the reduction")
    origin = root.target if root.op == "call_function" else root.op
    if root.op == "placeholder":
        origin = "an input of the graph: a matmul of another graph may compute it, before a graph break or DDPOptimizer's split"
    return Miss(Reason.NO_MATMUL, f"the reduced tensor comes from {root.name} ({origin})")


def _find_cast(node: Node) -> Node | None:
    """Return the cast through which the elements of `node` come, if any."""
    while (effect := element_effect(node)) is not None:
        if effect.kind is Effect.CAST:
            return node
        node = effect.source
    return None


def find_scaling(root: Node) -> Node | None:
    """Return the node that scales a matmul's result, in the sum of `root`."""
    todo, seen = [root], set[Node]()
    while todo and len(seen) < _SUMMAND_LIMIT:
        node = todo.pop()
        while (effect := element_effect(node)) is not None:
            node = effect.source
        if node in seen:
            continue
        seen.add(node)
        if node.target in SCALINGS and any(comes_from_matmul(n) for n in node.all_input_nodes):
            return node
        todo += reversed(node.all_input_nodes if node.target in (*ADDS, *SUBTRACTIONS) else [])
    return None

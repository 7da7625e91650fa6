"""The all_reduces of amax values that float8 scales are computed from."""

from __future__ import annotations

from torch.fx import Graph, Node

from ub_overlap.runtime.fp8.numerics import FLOAT8

from ..graph.aten import CASTS, aten, c10d, dtype_of, element_effect, shape_of, tensor_of
from ..graph.sizes import is_same, numel
from ..joint.joint_decision import joint_decision, record_decision
from .collectives import Collective, Op, read_collective

_CLAMPS = {aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default, aten.minimum.default, aten.maximum.default}
_CLAMP_DEPTH = 4
"""Clamps and casts followed from a scaled value to its cast to float8."""


def mark_amax_reductions(graph: Graph) -> None:
    """Record on a joint graph which all_reduces reduce amax. In one half of it their readers may be missing."""
    for node in graph.find_nodes(op="call_function", target=c10d.all_reduce.default):
        if is_amax_reduction(read_collective(node)):
            record_decision(node, carries_scales=True)


def is_amax_reduction(c: Collective) -> bool:
    """Return whether `c` reduces the amax of float8 tensors."""
    if joint_decision(c.node).carries_scales:
        return True
    if c.op is not Op.ALL_REDUCE or c.reduce_op != "max" or c.wait is None:
        return False
    node = c.input
    while (effect := element_effect(node)) is not None:
        node = effect.source
    return node.target in (aten.amax.default, aten.max.default) and _has_scaled_reader(c.wait)


def _has_scaled_reader(amax: Node) -> bool:
    """Return whether `amax`, or a value computed from it alone, scales a float8 matmul or a cast to float8.

    The largest logit, which a softmax over ranks subtracts, has no such reader.
    """
    seen, todo = {amax}, [amax]
    elements = numel(shape_of(amax))
    while todo:
        node = todo.pop()
        for user in node.users:
            if user.target is aten._scaled_mm.default:
                return True
            if user in seen or tensor_of(user) is None:
                continue
            seen.add(user)
            if is_same(numel(shape_of(user)), elements):
                todo.append(user)
            elif user.target in (aten.mul.Tensor, aten.div.Tensor) and _has_float8_cast(user):
                return True
    return False


def _has_float8_cast(node: Node, depth: int = _CLAMP_DEPTH) -> bool:
    """Return whether `node` is cast to float8, with or without clamps before."""
    for user in node.users:
        if tensor_of(user) is None:
            continue
        if dtype_of(user) in FLOAT8:
            return True
        if depth and (user.target in _CLAMPS or user.target in CASTS) and _has_float8_cast(user, depth - 1):
            return True
    return False

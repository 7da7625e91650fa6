"""Scales that stand behind a float8 product become its own, where that is exact.

    _scaled_mm(a, b, 1, 1) -> * (r * c) -> cast          =>          _scaled_mm(a, b, r, c)         r [M, 1], c [1, N]

torchao scales products without fast accumulation so. A sum over ranks that follows does not commute with scales that differ by
row, and two products that are summed have different ones; as scales of the product they are part of the site. Powers of two
alone: to multiply by them is exact, so it is the same before the result is rounded as behind (but for numbers below 2^-126).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from ub_overlap import _torch_compat as compat

from ...cost.policy import Policy
from ...cost.site_sizes import Hints, hints_of
from ...graph.aten import CUTS, Effect, aten, c10d, dtype_of, element_effect, readers, shape_of, tensor_of
from ...graph.emitter import Emitter
from ...graph.erase import erase_unread
from ...graph.joint_graph import needs_tangents
from ...graph.sizes import is_same, is_same_shape
from ..operand_layout import contiguous_scales
from ..provenance import before

_WHOLE = (aten.floor.default, aten.ceil.default, aten.round.default, aten.trunc.default)
_SPREADS = (aten.repeat.default, aten.expand.default)
_SHORT = 16
"""Steps from a product to the collective beside it."""


def fold_scales(graph: Graph, policy: Policy) -> int:
    """Rewrites in place the products beside a gather of their rows, or a reduce_scatter that is not below the threshold;
    returns how many."""
    products = graph.find_nodes(op="call_function", target=aten._scaled_mm.default)
    if not products:
        return 0
    tangents, hints = needs_tangents(graph), hints_of(graph)
    inputs = [n for n in graph.find_nodes(op="placeholder") if n not in tangents]
    count = 0
    for node in products:
        if (found := _scaled_behind(node)) is None or not (_gathered(found[1]) or _scattered(found[0], policy, hints)):
            continue
        result, rows, columns = found
        with graph.inserting_before(result):
            e = Emitter(graph, node, {}, inputs=inputs)
            rows, columns = (contiguous_scales(e, n, shape_of(n)) for n in (rows, columns))
            folded = e.call(node.target, *node.args[:2], rows, columns, *node.args[4:], **node.kwargs)
        folded.meta |= {k: node.meta[k] for k in ("recompute", "ac_graph_id") if k in node.meta}
        result.replace_all_uses_with(folded)
        scaled = result.all_input_nodes[0]
        erase_unread(graph, (result, scaled, *scaled.all_input_nodes))
        count += 1
    return count


def _scaled_behind(node: Node) -> tuple[Node, Node, Node] | None:
    """(the result, scales [M, 1], scales [1, N]) of a product in bfloat16 (no other has scales of rows) that is scaled by
    powers of two behind it."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    given: dict[str, Any] = {a.name: x for a, x in zip(schema, node.args, strict=False)} | dict(node.kwargs)
    ours = len(node.args) >= 4 and all(_is_one(given[name]) for name in ("scale_a", "scale_b"))
    if (
        not ours
        or given.get("bias") is not None
        or given.get("scale_result") is not None
        or dtype_of(node) is not torch.bfloat16
    ):
        return None
    if node.meta["val"].device.type == "cpu" and not compat.cpu_scales_rows():
        return None
    if len(readers(node)) != 1 or (scaled := readers(node)[0]).target is not aten.mul.Tensor or len(readers(scaled)) != 1:
        return None
    result = readers(scaled)[0]
    step = element_effect(result)
    if step is None or step.effect is not Effect.CAST or dtype_of(result) is not torch.bfloat16:
        return None
    (by,) = [n for n in scaled.all_input_nodes if n is not node] or [node]
    if by.target is not aten.mul.Tensor or len(by.all_input_nodes) != 2:
        return None
    m, n = shape_of(node)
    for rows, columns in (by.all_input_nodes, by.all_input_nodes[::-1]):
        shapes = is_same_shape(shape_of(rows), (m, 1)) and is_same_shape(shape_of(columns), (1, n))
        if shapes and _power_of_two(rows) and _power_of_two(columns):
            return result, rows, columns
    return None


def _is_one(node: object) -> bool:
    """Is it the number 1, as a tensor of one element?"""
    if not isinstance(node, Node) or not all(is_same(s, 1) for s in shape_of(node)):
        return False
    if node.target in (aten.new_ones.default, aten.ones.default, aten.ones_like.default):
        return True
    return node.target is aten.full.default and bool(node.args[1] == 1)


def _power_of_two(node: Node) -> bool:
    """Is each element certainly 2 to a whole number, in float32?"""
    if tensor_of(node) is None or dtype_of(node) is not torch.float32:
        return False
    if node.target is aten.exp2.default:
        return node.all_input_nodes[0].target in _WHOLE
    if node.target is aten.reciprocal.default or node.target in _SPREADS:
        return _power_of_two(node.all_input_nodes[0])
    found = before(node)
    return found is not None and _power_of_two(found)


def _gathered(rows: Node) -> bool:
    """Did scales of rows come with a gather?"""
    node: Node | None = rows
    while node is not None and node.target is not c10d.all_gather_into_tensor.default:
        node = before(node)
    return node is not None


def _scattered(node: Node, policy: Policy, hints: Hints, depth: int = _SHORT) -> bool:
    """Does a reduce_scatter of enough bytes sum `node` over the ranks, through views and sums with others?"""
    for user in readers(node) if depth else ():
        if user.target is c10d.reduce_scatter_tensor.default:
            return not policy.is_below_threshold(policy.bytes_sent_in(user, dtype_of(node).itemsize, hints))
        step = element_effect(user)
        through = step is not None and step.effect is not Effect.CAST
        cut = (
            user.target in CUTS or node.target in CUTS or user.target in (aten.cat.default, aten.slice.Tensor, aten.add.Tensor)
        )
        if (through or cut) and _scattered(user, policy, hints, depth - 1):
            return True
    return False

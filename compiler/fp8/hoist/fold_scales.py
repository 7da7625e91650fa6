"""Fold scales that are applied after a float8 matmul into the matmul, where that is exact.

    _scaled_mm(a, b, 1, 1) -> * (r * c) -> cast          =>          _scaled_mm(a, b, r, c)         r [M, 1], c [1, N]

torchao scales matmuls without fast accumulation this way. A following sum over ranks does not commute with per-row scales,
and the terms of a sum have different scales. As scales of the matmul they are part of the site. Only powers of two are
folded: multiplying by them is exact, so it gives the same before the result is rounded as after (except below 2^-126).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from ub_overlap import _torch_compat as compat

from ...cost.policy import Policy
from ...cost.site_sizes import Hints, hints_of
from ...graph.aten import CUTS, Effect, aten, c10d, dtype_of, element_effect, readers, shape_of, tensor_of
from ...graph.emitter import Emitter
from ...graph.erase import erase_unread
from ...graph.joint_graph import CHECKPOINT_KEYS, needs_tangents
from ...graph.sizes import is_same, is_same_shape
from ..operand_layout import emit_contiguous_scales
from ..provenance import element_source

_ROUNDINGS = (aten.floor.default, aten.ceil.default, aten.round.default, aten.trunc.default)
_BROADCASTS = (aten.repeat.default, aten.expand.default)
_MAX_STEPS = 16
"""Steps from a matmul to the collective that reduces its result."""


@dataclass(frozen=True, slots=True)
class _ScaledResult:
    """`result`: the cast of a matmul times `row_scales` [M, 1] times `column_scales` [1, N]."""

    result: Node
    row_scales: Node
    column_scales: Node


def fold_scales(graph: Graph, policy: Policy) -> int:
    """Fold scales in place. Return how many matmuls changed.

    Only matmuls of gathered rows, and those before a reduce_scatter above the policy's threshold, are rewritten.
    """
    matmuls = graph.find_nodes(op="call_function", target=aten._scaled_mm.default)
    if not matmuls:
        return 0
    backward, hints = needs_tangents(graph), hints_of(graph)
    inputs = [n for n in graph.find_nodes(op="placeholder") if n not in backward]
    count = 0
    for matmul in matmuls:
        scaled = _match_scaled_result(matmul)
        if scaled is None:
            continue
        if _is_gathered(scaled.row_scales) or _is_scattered(scaled.result, policy, hints):
            _fold(graph, matmul, scaled, inputs)
            count += 1
    return count


def _fold(graph: Graph, matmul: Node, scaled: _ScaledResult, inputs: Sequence[Node]) -> None:
    result = scaled.result
    with graph.inserting_before(result):
        e = Emitter(graph, matmul, {}, inputs=inputs)
        scales = [emit_contiguous_scales(e, n, shape_of(n)) for n in (scaled.row_scales, scaled.column_scales)]
        folded = e.call(matmul.target, *matmul.args[:2], *scales, *matmul.args[4:], **matmul.kwargs)
    folded.meta |= {k: matmul.meta[k] for k in CHECKPOINT_KEYS if k in matmul.meta}
    result.replace_all_uses_with(folded)
    multiplied = result.all_input_nodes[0]
    erase_unread(graph, (result, multiplied, *multiplied.all_input_nodes))


def _match_scaled_result(matmul: Node) -> _ScaledResult | None:
    """Match a bfloat16 matmul (no other dtype has per-row scales) whose result is scaled by powers of two."""
    if not _can_take_scales(matmul):
        return None
    if len(readers(matmul)) != 1 or (multiplied := readers(matmul)[0]).target is not aten.mul.Tensor:
        return None
    if len(readers(multiplied)) != 1:
        return None
    result = readers(multiplied)[0]
    step = element_effect(result)
    if step is None or step.kind is not Effect.CAST or dtype_of(result) is not torch.bfloat16:
        return None
    (factor,) = [n for n in multiplied.all_input_nodes if n is not matmul] or [matmul]
    if factor.target is not aten.mul.Tensor or len(factor.all_input_nodes) != 2:
        return None
    m, n = shape_of(matmul)
    for rows, columns in (factor.all_input_nodes, factor.all_input_nodes[::-1]):
        fits = is_same_shape(shape_of(rows), (m, 1)) and is_same_shape(shape_of(columns), (1, n))
        if fits and _is_power_of_two(rows) and _is_power_of_two(columns):
            return _ScaledResult(result, rows, columns)
    return None


def _can_take_scales(matmul: Node) -> bool:
    """Return whether the scales of `matmul` are 1 and may be replaced by per-row ones."""
    schema = matmul.target._schema.arguments  # type: ignore[union-attr]
    arguments: dict[str, Any] = {a.name: x for a, x in zip(schema, matmul.args, strict=False)} | dict(matmul.kwargs)
    if len(matmul.args) < 4 or not all(_is_one(arguments[name]) for name in ("scale_a", "scale_b")):
        return False
    if arguments.get("bias") is not None or arguments.get("scale_result") is not None:
        return False
    if dtype_of(matmul) is not torch.bfloat16:
        return False
    return matmul.meta["val"].device.type != "cpu" or compat.cpu_scales_rows()


def _is_one(node: object) -> bool:
    """Return whether `node` is the number 1 as a tensor of one element."""
    if not isinstance(node, Node) or not all(is_same(s, 1) for s in shape_of(node)):
        return False
    if node.target in (aten.new_ones.default, aten.ones.default, aten.ones_like.default):
        return True
    return node.target is aten.full.default and bool(node.args[1] == 1)


def _is_power_of_two(node: Node) -> bool:
    """Return whether each element certainly is an integer power of two in float32."""
    if tensor_of(node) is None or dtype_of(node) is not torch.float32:
        return False
    if node.target is aten.exp2.default:
        return node.all_input_nodes[0].target in _ROUNDINGS
    if node.target is aten.reciprocal.default or node.target in _BROADCASTS:
        return _is_power_of_two(node.all_input_nodes[0])
    previous = element_source(node)
    return previous is not None and _is_power_of_two(previous)


def _is_gathered(row_scales: Node) -> bool:
    """Return whether an all_gather produced the scales."""
    node: Node | None = row_scales
    while node is not None and node.target is not c10d.all_gather_into_tensor.default:
        node = element_source(node)
    return node is not None


def _is_scattered(node: Node, policy: Policy, hints: Hints, depth: int = _MAX_STEPS) -> bool:
    """Return whether a reduce_scatter of enough bytes sums `node` over the ranks, after views and sums with other terms."""
    for user in readers(node) if depth else ():
        if user.target is c10d.reduce_scatter_tensor.default:
            return not policy.is_below_threshold(policy.bytes_sent_in(user, dtype_of(node).itemsize, hints))
        step = element_effect(user)
        is_view = step is not None and step.kind is not Effect.CAST
        is_join = user.target in (aten.cat.default, aten.slice.Tensor, aten.add.Tensor)
        is_cut = user.target in CUTS or node.target in CUTS
        if (is_view or is_join or is_cut) and _is_scattered(user, policy, hints, depth - 1):
            return True
    return False

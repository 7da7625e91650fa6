"""The weights that the first matmuls behind a collective read. A GPU may prefetch them while it waits for its peers.

wait -> residual, norm, cast, views -> matmul(x, weight)     weight: an input of the graph, or its transpose
"""

from __future__ import annotations

from torch.fx import Node

from ..graph.aten import PERMUTES, alias_base, tensor_of
from ..graph.compute import is_compute
from ..graph.matmul import as_matmul
from .collectives import Collective, is_collective
from .site import NextWeight

MOST = 4
"""Operands of a call (csrc/core/fused_collective.h)."""


def find_next_weights(c: Collective, bytes: int) -> tuple[NextWeight, ...]:
    """Return the weights of the first matmuls that read the result, in the graph's order: as many as have `bytes` bytes.

    They end at the next collective, whose wait is another chance to prefetch.
    """
    assert c.wait is not None
    reached, found, left = {c.wait}, dict[Node, NextWeight](), bytes
    node = c.wait.next
    while node.op != "root" and not is_collective(node) and left > 0 and len(found) < MOST:
        is_reader = not reached.isdisjoint(node.all_input_nodes)
        if is_reader and not is_compute(node):
            reached.add(node)
        elif is_reader and (weight := _weight_of(node, c.wait)) is not None and weight.node not in found:
            found[weight.node] = weight
            left -= weight.bytes
        node = node.next
    return tuple(found.values())


def _weight_of(node: Node, result: Node) -> NextWeight | None:
    """Return the right operand of a matmul if it is an input of the graph, with static sizes and dense rows or columns.

    It is on the device of the collective's `result`.
    """
    if (matmul := as_matmul(node)) is None:
        return None
    operand = matmul.rhs.node
    source = alias_base(operand) if operand.target in PERMUTES else operand
    val = tensor_of(operand)
    if source is None or source.op not in ("placeholder", "get_attr") or val is None or val.dim() != 2:
        return None
    if val.device != result.meta["val"].device:
        return None
    if not all(isinstance(n, int) for n in (*val.shape, *val.stride())) or 1 not in val.stride():
        return None
    return NextWeight(source, operand is not source, node, val.numel() * val.dtype.itemsize)

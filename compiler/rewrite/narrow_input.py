"""Repeat on the narrow tensor what a graph does behind its widening cast (match/widening_cast.py)."""

from __future__ import annotations

from torch.fx import Node

from ..graph.aten import PERMUTES, Effect, aten, constant_scaling, element_effect, is_getitem, permutation, shape_of
from ..graph.emitter import Emitter
from ..match.widening_cast import WideningCast, moved_tensors


def emit_narrow(e: Emitter, tensor: Node, widening: WideningCast) -> Node:
    """Emit `tensor`, which `widening` ends with, in the narrow type. Scalings are left out: they follow the sum."""
    if widening.rounds:
        return e.cast(tensor, widening.dtype)
    narrow: dict[Node, Node] = {}
    for node in widening.nodes:  # in graph order: what a node moves comes before it
        narrow[node] = _emit_one(e, node, narrow)
    return narrow[tensor]


def _emit_one(e: Emitter, node: Node, narrow: dict[Node, Node]) -> Node:
    effect = element_effect(node)
    if effect is not None and effect.kind is Effect.CAST:
        return e.reshape(e.current(effect.source), shape_of(node))
    if constant_scaling(node):
        return narrow[node.all_input_nodes[0]]
    sources = [narrow[source] for source in moved_tensors(node)]
    if node.target in PERMUTES:
        return e.call(aten.permute.default, sources[0], permutation(node))
    if effect is not None:
        return e.reshape(sources[0], shape_of(node))
    if node.target is aten.cat.default:
        return e.call(node.target, sources, *node.args[1:], **node.kwargs)
    if is_getitem(node):
        return e.item(sources[0], node.args[1])  # type: ignore[arg-type]
    return e.call(node.target, sources[0], *node.args[1:], **node.kwargs)

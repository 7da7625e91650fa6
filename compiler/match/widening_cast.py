"""The widening cast in front of a reduction: its input can be sent, and summed in the type of its result.

    bf16 -> cast to fp32 -> [view | permute | split, cat | pad with 0 | scale by a constant]* -> reduction

A cast from bf16 or fp16 to fp32 is exact, and sums are taken in fp32. So the reduction of the narrow tensor, returned in
fp32, has the same summands. Views, permutes, cats and pads move elements: they move the narrow ones just as well. Scalings
commute with the sum and follow it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from ..graph.aten import (
    CUTS,
    PADS,
    PERMUTES,
    Effect,
    Scaling,
    aten,
    constant_scaling,
    dtype_of,
    element_effect,
    is_getitem,
    node_arg,
    pieces_of,
    readers,
    tensor_of,
)

NARROW = (torch.bfloat16, torch.float16)
WIDE = torch.float32


@dataclass(frozen=True, slots=True)
class WideningCast:
    """The casts whose results one reduction reads, and the nodes between them and the reduction."""

    dtype: torch.dtype
    """The type before the cast."""
    nodes: tuple[Node, ...]
    """The casts and the nodes behind them, in graph order. Nothing but the reduction reads their elements. Empty where the
    reduction's own input is to be rounded to `dtype` (select/reduce_dtype.py)."""
    scalings: tuple[Scaling, ...]
    """(op, constant) pairs, first applied first."""

    @property
    def rounds(self) -> bool:
        """Whether the narrow tensor is not the traced one, but the reduction's input rounded."""
        return not self.nodes


def find_widening_cast(tensor: Node, reduction: Node) -> WideningCast | None:
    """Return the casts from one narrow type that `tensor`, the input of `reduction`, is made of. None where it is not."""
    if tensor_of(tensor) is None or dtype_of(tensor) != WIDE:
        return None
    todo, nodes = {tensor}, list[Node]()
    narrow, scalings = set[torch.dtype](), list[Scaling]()
    while todo:
        node = max(todo)  # the last in graph order
        todo.remove(node)
        nodes.append(node)
        effect = element_effect(node)
        if effect is not None and effect.kind is Effect.CAST:
            narrow.add(dtype_of(effect.source))
        elif (scaling := constant_scaling(node)) and not todo and not narrow:  # all elements of `tensor` pass here
            scalings.append(scaling)
            todo.add(node_arg(node))
        elif sources := moved_tensors(node):
            todo.update(sources)
        else:
            return None
    inside = {*nodes, reduction}
    has_other_readers = any(user not in inside for node in nodes for user in readers(node))
    if has_other_readers or len(narrow) != 1 or not narrow <= set(NARROW):
        return None
    return WideningCast(narrow.pop(), tuple(nodes[::-1]), tuple(scalings[::-1]))


def moved_tensors(node: Node) -> list[Node]:
    """Return the tensors whose elements `node` moves without a change; none for other nodes. A pad also adds zeros."""
    effect = element_effect(node)
    if effect is not None:
        return [effect.source] if effect.kind is not Effect.BITCAST else []
    if node.op != "call_function":
        return []
    if node.target is aten.cat.default:
        return pieces_of(node)
    if node.target in PADS:
        fills_zeros = not any(node.args[2:]) and not any(node.kwargs.values())
        return [node_arg(node)] if fills_zeros else []
    is_move = node.target in PERMUTES or node.target in CUTS or node.target is aten.slice.Tensor or is_getitem(node)
    return [node_arg(node)] if is_move else []

"""The stored matrix behind an operand."""

from __future__ import annotations

from collections.abc import Callable

from torch.fx import Node

from .aten import Effect, aten, element_effect, node_arg, shape_of
from .matmul import Operand
from .sizes import is_same_shape

_VIEWS = {aten.view.default, aten.reshape.default, aten._unsafe_view.default}


def find_source(operand: Operand, current: Callable[[Node], Node] = lambda node: node) -> Operand:
    """Return the operand as the matrix of the node that its views and transposes start from.

    `current`: the replacement of a node that was rewritten.
    """
    node = current(operand.node)
    while (effect := element_effect(node)) is not None:
        is_matrix = len(shape_of(effect.source)) == 2 and is_same_shape(shape_of(node), operand.shape)
        if effect.kind is Effect.TRANSPOSE and is_matrix:
            operand = Operand(effect.source, (operand.shape[1], operand.shape[0]), not operand.is_transposed)
        elif node.target in _VIEWS:
            operand = Operand(node_arg(node), operand.shape, operand.is_transposed)
        else:
            break
        node = current(operand.node)
    return Operand(node, operand.shape, operand.is_transposed)

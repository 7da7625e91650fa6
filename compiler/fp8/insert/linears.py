"""Find the linears of a joint graph: a weight, its forward matmul, and the two matmuls of its gradients.

    y = x @ w^T          forward: one operand comes from a graph input, through views, casts and gathers
    dx = dy @ w          input gradient: the same weight and a gradient
    dw = dy^T @ x        weight gradient: the same activation and a gradient

Attention multiplies activations with each other: it has no weight, so it is not a linear.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from torch.fx import Graph, Node

from ...graph.aten import shape_of
from ...graph.matmul import Matmul, as_matmul, is_matmul
from ...graph.sizes import is_same
from ..provenance import find_origin


class Role(str, Enum):
    FORWARD = "forward"
    INPUT_GRADIENT = "input gradient"
    WEIGHT_GRADIENT = "weight gradient"


@dataclass(eq=False, slots=True)
class Linear:
    """A linear. `activation`, `weight`: the origins of its forward operands."""

    forward: Matmul
    activation: Node
    weight: Node
    input_gradients: list[Matmul] = field(default_factory=list)
    weight_gradients: list[Matmul] = field(default_factory=list)

    @property
    def matmuls(self) -> list[tuple[Role, Matmul]]:
        return [
            (Role.FORWARD, self.forward),
            *((Role.INPUT_GRADIENT, m) for m in self.input_gradients),
            *((Role.WEIGHT_GRADIENT, m) for m in self.weight_gradients),
        ]


def find_linears(graph: Graph, backward: set[Node]) -> list[Linear]:
    """Return every linear of `graph` in graph order. `backward`: the nodes of its backward half.

    A weight gradient that several linears may own is listed with each of them.
    """
    linears: list[Linear] = []
    backward_matmuls: list[Matmul] = []
    for node in graph.nodes:
        matmul = as_matmul(node) if is_matmul(node) else None
        if matmul is None or matmul.scales is not None:
            continue
        if node in backward:
            backward_matmuls.append(matmul)
        elif (side := _find_weight_side(matmul)) is not None:
            weight, activation = (matmul.rhs, matmul.lhs) if side == "rhs" else (matmul.lhs, matmul.rhs)
            linears.append(Linear(matmul, find_origin(activation.node), find_origin(weight.node)))
    _attach_gradients(linears, backward_matmuls, backward)
    return linears


def _find_weight_side(matmul: Matmul) -> str | None:
    """Return which operand is the weight."""
    for side, operand in (("rhs", matmul.rhs), ("lhs", matmul.lhs)):
        root = find_origin(operand.node)
        if root.op == "placeholder" and len(shape_of(root)) >= 2:
            return side
    return None


def _attach_gradients(linears: list[Linear], matmuls: list[Matmul], backward: set[Node]) -> None:
    """Add the backward matmuls to the linears whose gradients they are."""
    gradients: dict[Linear, set[Node]] = {linear: set() for linear in linears}
    left: list[tuple[Matmul, Node, Node]] = []
    for matmul in matmuls:
        for operand, other in ((matmul.lhs, matmul.rhs), (matmul.rhs, matmul.lhs)):
            if operand.node not in backward or other.node in backward:
                continue
            gradient, saved = find_origin(operand.node), find_origin(other.node)
            owners = [linear for linear in linears if linear.weight is saved and _is_input_gradient(matmul, linear)]
            for linear in owners:
                linear.input_gradients.append(matmul)
                gradients[linear].add(gradient)
            if not owners:
                left.append((matmul, gradient, saved))
    for matmul, gradient, saved in left:
        fitting = [linear for linear in linears if linear.activation is saved and _is_weight_gradient(matmul, linear)]
        of_gradient = [linear for linear in fitting if gradient in gradients[linear]]
        for linear in of_gradient or fitting:
            linear.weight_gradients.append(matmul)


def _is_input_gradient(matmul: Matmul, linear: Linear) -> bool:
    forward = linear.forward
    return _sorted_dims(matmul) == _sorted_dims(forward) and any(is_same(matmul.inner, n) for n in forward.shape)


def _is_weight_gradient(matmul: Matmul, linear: Linear) -> bool:
    return _sorted_dims(matmul) == _sorted_dims(linear.forward)


def _sorted_dims(matmul: Matmul) -> list[str]:
    return sorted(map(str, (*matmul.shape, matmul.inner)))

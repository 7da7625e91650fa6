"""The linears of a joint graph: a weight, its forward product, and the two products of its gradients.

    y = x @ w^T          forward: one operand comes from an input of the graph, through views, casts and gathers
    dx = dy @ w          input gradient: the same weight beside a gradient
    dw = dy^T @ x        weight gradient: the same activation beside a gradient

Attention multiplies activations with each other: no weight, no linear.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from torch.fx import Graph, Node

from ...graph.aten import shape_of
from ...graph.matmul import Matmul, as_matmul, is_matmul
from ...graph.sizes import is_same
from ..provenance import origin


class Role(str, Enum):
    FORWARD = "forward"
    INPUT_GRADIENT = "input gradient"
    WEIGHT_GRADIENT = "weight gradient"


@dataclass(eq=False, slots=True)
class Linear:
    """`activation`, `weight`: origins of the forward product's operands. `inputs`, `weights`: its gradients' products."""

    forward: Matmul
    activation: Node
    weight: Node
    inputs: list[Matmul] = field(default_factory=list)
    weights: list[Matmul] = field(default_factory=list)

    @property
    def products(self) -> list[tuple[Role, Matmul]]:
        return [
            (Role.FORWARD, self.forward),
            *((Role.INPUT_GRADIENT, p) for p in self.inputs),
            *((Role.WEIGHT_GRADIENT, p) for p in self.weights),
        ]


def linears(graph: Graph, backward: set[Node]) -> list[Linear]:
    """Every linear of `graph`, in graph order; `backward`: the nodes of its backward half. A weight gradient that several
    might own is listed with each of them."""
    found: list[Linear] = []
    later: list[Matmul] = []
    for node in graph.nodes:
        p = as_matmul(node) if is_matmul(node) else None
        if p is None or p.scales is not None:
            continue
        if node in backward:
            later.append(p)
        elif (side := _weight(p)) is not None:
            weight, activation = (p.rhs, p.lhs) if side == "rhs" else (p.lhs, p.rhs)
            found.append(Linear(p, origin(activation.node), origin(weight.node)))
    _attach(found, later, backward)
    return found


def _weight(p: Matmul) -> str | None:
    """Which operand is the weight."""
    for side, operand in (("rhs", p.rhs), ("lhs", p.lhs)):
        root = origin(operand.node)
        if root.op == "placeholder" and len(shape_of(root)) >= 2:
            return side
    return None


def _attach(found: list[Linear], products: list[Matmul], backward: set[Node]) -> None:
    gradients: dict[Linear, set[Node]] = {linear: set() for linear in found}
    left: list[tuple[Matmul, Node, Node]] = []
    for p in products:
        for one, other in ((p.lhs, p.rhs), (p.rhs, p.lhs)):
            if one.node not in backward or other.node in backward:
                continue
            gradient, kept = origin(one.node), origin(other.node)
            owners = [linear for linear in found if linear.weight is kept and _is_input_gradient(p, linear)]
            for linear in owners:
                linear.inputs.append(p)
                gradients[linear].add(gradient)
            if not owners:
                left.append((p, gradient, kept))
    for p, gradient, kept in left:
        fit = [linear for linear in found if linear.activation is kept and _is_weight_gradient(p, linear)]
        known = [linear for linear in fit if gradient in gradients[linear]]
        for linear in known or fit:
            linear.weights.append(p)


def _is_input_gradient(p: Matmul, linear: Linear) -> bool:
    f = linear.forward
    return _dims(p) == _dims(f) and any(is_same(p.inner, n) for n in f.shape)


def _is_weight_gradient(p: Matmul, linear: Linear) -> bool:
    return _dims(p) == _dims(linear.forward)


def _dims(p: Matmul) -> list[str]:
    return sorted(map(str, (*p.shape, p.inner)))

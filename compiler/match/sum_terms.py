"""The backward walk from the root of a sum over its summands: matmuls and addends."""

from __future__ import annotations

from torch.fx import Node

from ..graph.aten import Effect, aten, element_effect, readers, shape_of, tensor_of
from ..graph.matmul import Matmul, as_matmul, comes_from_matmul
from ..graph.sizes import Size, is_same_shape, squeezed
from ..plan.reasons import Reason
from .site import Addend, Miss

ADDS = (aten.add.Tensor, aten.add.Scalar)
SUBTRACTIONS = (aten.sub.Tensor, aten.sub.Scalar)


class SumTerms:
    """The summands of the root of a sum.

    `terms`: (matmul, is transposed). `addends`: what is added to them. `inner`: the nodes between the root and its summands.
    `blocked`: why summands are no terms.

    A transposed summand holds the transpose of the matrix that is reduced: no view may give it another shape.
    """

    def __init__(self, root: Node, is_transposed: bool) -> None:
        self.root = root
        self.terms: list[tuple[Matmul, bool]] = []
        self.addends: list[Addend] = []
        self.inner: list[Node] = []
        self.blocked: list[Miss] = []
        self._add_summand(root, is_transposed, is_private=True)

    @property
    def matmuls(self) -> list[Matmul]:
        """The terms, oriented like the matrix that is reduced."""
        return [_transpose(p) if is_transposed else p for p, is_transposed in self.terms]

    def _add_summand(self, node: Node, is_transposed: bool, is_private: bool) -> None:
        """Record one summand of full size. `is_private`: all readers of `node` are inside the sum."""
        if is_private and self._pass_view(node, is_transposed):
            return
        if is_private and (matmul := _as_term(node, is_transposed)) is not None:
            self.terms.append((matmul, is_transposed))
            if matmul.bias is not None:
                self._add_to_sum(matmul.bias, matmul.shape, is_transposed)
        elif is_private and _is_sum(node):
            self._add_sum(node, is_transposed)
        else:
            self.addends.append(Addend(node, shape_of(node), is_transposed))

    def _pass_view(self, node: Node, is_transposed: bool) -> bool:
        """Continue to the source of a view or a transpose. Return False for other nodes."""
        effect = element_effect(node) if node is not self.root else None
        if effect is None or effect.kind is Effect.CAST:
            return False
        source, transposes = effect.source, effect.kind is Effect.TRANSPOSE
        if is_transposed and not transposes and not is_same_shape(squeezed(shape_of(source)), squeezed(shape_of(node))):
            return False
        self.inner.append(node)
        self._add_summand(source, is_transposed != transposes, len(readers(source)) == 1)
        return True

    def _add_sum(self, node: Node, is_transposed: bool) -> None:
        """Record both operands of a sum or a difference, at least one of which has full size."""
        shape, factor = shape_of(node), float(node.kwargs.get("alpha", 1))  # type: ignore[arg-type]
        if node.target in SUBTRACTIONS:
            factor = -factor
        left, right = node.args
        if factor == 1 and not _has_shape(left, shape):
            left, right = right, left
        if not _has_shape(left, shape):
            for value in (left, right) if not _has_shape(right, shape) else ():
                self._note_broadcast(value)
            self.addends.append(Addend(node, shape, is_transposed))
            return
        self.inner.append(node)
        assert isinstance(left, Node)
        is_doubled = left is right  # its two readers are one node
        self._add_summand(left, is_transposed, len(readers(left)) == 1 and not is_doubled)
        self._add_to_sum(right, shape, is_transposed, factor, not is_doubled)

    def _add_to_sum(
        self, value: object, shape: tuple[Size, ...], is_transposed: bool, factor: float = 1.0, may_be_term: bool = True
    ) -> None:
        """Record what is added to a summand of `shape`: a further summand of full size, or an addend that broadcasts."""
        if isinstance(value, Node) and factor == 1 and _has_shape(value, shape):
            self._add_summand(value, is_transposed, len(readers(value)) == 1 and may_be_term)
            return
        assert isinstance(value, Node | int | float)
        if not _has_shape(value, shape):
            self._note_broadcast(value)
        if value != 0:  # ranks other than the one with the bias often add 0
            self.addends.append(Addend(value, shape, is_transposed, factor))

    def _note_broadcast(self, value: object) -> None:
        if isinstance(value, Node) and comes_from_matmul(value):
            self.blocked.append(Miss(Reason.BROADCAST_SUM, f"the sum broadcasts {value.name}"))


def _as_term(node: Node, is_transposed: bool) -> Matmul | None:
    """The matmul of `node` if it can be a term of the sum."""
    matmul = as_matmul(node)
    if matmul is None or not is_transposed:
        return matmul
    if matmul.scales is not None:  # float8 operands have one layout
        return None
    is_matrix = is_same_shape(squeezed(matmul.shape), squeezed(shape_of(node)))  # a batch may have the shape of a matrix
    return matmul if is_matrix else None


def _is_sum(node: Node) -> bool:
    """Return whether `node` is the sum or the difference of tensors and real numbers."""
    if node.target not in (*ADDS, *SUBTRACTIONS) or len(node.args) != 2:
        return False
    return isinstance(node.kwargs.get("alpha", 1), int | float) and all(isinstance(a, Node | int | float) for a in node.args)


def _has_shape(value: object, shape: tuple[Size, ...]) -> bool:
    """Return whether `value` is a tensor of `shape`, up to dims of size 1."""
    return (
        isinstance(value, Node) and tensor_of(value) is not None and is_same_shape(squeezed(shape_of(value)), squeezed(shape))
    )


def _transpose(matmul: Matmul) -> Matmul:
    return Matmul(matmul.node, matmul.rhs.t, matmul.lhs.t, matmul.bias)

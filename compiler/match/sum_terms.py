"""The backward walk from the root of a sum over its summands: matmuls, addends and biases."""

from __future__ import annotations

from torch.fx import Node

from ..graph.aten import Effect, aten, element_effect, readers, shape_of
from ..graph.matmul import Matmul, as_matmul
from ..graph.sizes import is_same, is_same_shape, squeezed
from ..plan.reasons import Reason
from .site import Miss

ADDS = (aten.add.Tensor,)


class SumTerms:
    """The summands of the root of a sum.

    `terms`: (matmul, is transposed). `addends`: (node, is transposed) of summands that are no matmuls. `biases`: rows that
    are added to every row. `inner`: the nodes between the root and its summands. `blocked`: why summands are no terms.

    A transposed summand holds the transpose of the matrix that is reduced: no view may give it another shape.
    """

    def __init__(self, root: Node, is_transposed: bool) -> None:
        self.root = root
        self.terms: list[tuple[Matmul, bool]] = []
        self.addends: list[tuple[Node, bool]] = []
        self.biases: list[Node] = []
        self.inner: list[Node] = []
        self.blocked: list[Miss] = []
        self._add_summand(root, is_transposed, is_private=True)

    @property
    def matmuls(self) -> list[Matmul]:
        """The terms, oriented like the matrix that is reduced."""
        return [_transpose(p) if is_transposed else p for p, is_transposed in self.terms]

    def _add_summand(self, node: Node, is_transposed: bool, is_private: bool) -> None:
        """Record one summand. `is_private`: all readers of `node` are inside the sum."""
        if not is_private:
            self.addends.append((node, is_transposed))
        elif self._pass_view(node, is_transposed):
            return
        elif (matmul := _as_term(node, is_transposed)) is not None:
            self._add_matmul(matmul, is_transposed)
        elif _is_plain_add(node):
            self._add_sum(node, is_transposed)
        else:
            self.addends.append((node, is_transposed))

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

    def _add_matmul(self, matmul: Matmul, is_transposed: bool) -> None:
        if matmul.bias is not None and not self._add_bias(matmul, matmul.bias, is_transposed):
            detail = f"{matmul.node.name} broadcasts its bias over something else than rows"
            self._add_blocked(matmul.node, is_transposed, detail)
            return
        self.terms.append((matmul, is_transposed))

    def _add_bias(self, matmul: Matmul, bias: Node, is_transposed: bool) -> bool:
        """Record the first operand of an addmm: a row, or a further summand. Return False for other broadcasts."""
        if len(shape_of(bias)) == 1 and is_same(shape_of(bias)[0], matmul.shape[1]) and not is_transposed:
            self.biases.append(bias)
            return True
        if is_same_shape(shape_of(bias), matmul.shape):
            self._add_summand(bias, is_transposed, len(readers(bias)) == 1)
            return True
        return False

    def _add_sum(self, add: Node, is_transposed: bool) -> None:
        """Record the two operands of an add: a matrix and a row, or two matrices."""
        if not is_transposed and (row := _added_row(add)) is not None:
            matrix, bias = row
            self.inner.append(add)
            self.biases.append(bias)
            self._add_summand(matrix, is_transposed, len(readers(matrix)) == 1)
            return
        a, b = add.args
        assert isinstance(a, Node) and isinstance(b, Node)
        shape = squeezed(shape_of(add))
        if not is_same_shape(squeezed(shape_of(a)), shape) or not is_same_shape(squeezed(shape_of(b)), shape):
            self._add_blocked(add, is_transposed, f"{add.name} broadcasts a term of the sum")
            return
        self.inner.append(add)
        for n in (a, b):
            self._add_summand(n, is_transposed, len(readers(n)) == 1 and a is not b)

    def _add_blocked(self, node: Node, is_transposed: bool, detail: str) -> None:
        self.blocked.append(Miss(Reason.BROADCAST_SUM, detail))
        self.addends.append((node, is_transposed))


def _as_term(node: Node, is_transposed: bool) -> Matmul | None:
    """The matmul of `node` if it can be a term of the sum."""
    matmul = as_matmul(node)
    if matmul is None or not is_transposed:
        return matmul
    if matmul.scales is not None:  # float8 operands have one layout
        return None
    is_matrix = is_same_shape(squeezed(matmul.shape), squeezed(shape_of(node)))  # a batch may have the shape of a matrix
    return matmul if is_matrix else None


def _is_plain_add(node: Node) -> bool:
    """Return whether `node` is the sum of two tensors."""
    has_scale = node.kwargs.get("alpha", 1) != 1
    return node.target in ADDS and not has_scale and all(isinstance(a, Node) for a in node.args)


def _added_row(add: Node) -> tuple[Node, Node] | None:
    """(matrix, row) if `add` adds one row to every row of a matrix."""
    for matrix, row in (add.args, add.args[::-1]):
        assert isinstance(matrix, Node) and isinstance(row, Node)
        wide, narrow = shape_of(add), shape_of(row)
        # The row's own last dim: a column [n, 1] over [n, n] has the same number of elements and is another sum.
        is_row = len(squeezed(narrow)) == 1 and is_same_shape(narrow[-1:], wide[-1:])
        if is_row and is_same_shape(shape_of(matrix), wide) and len(squeezed(wide)) > 1:
            return matrix, row
    return None


def _transpose(matmul: Matmul) -> Matmul:
    return Matmul(matmul.node, matmul.rhs.t, matmul.lhs.t, matmul.bias)

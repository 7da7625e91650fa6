"""Every spelling of a matmul as one 2D matmul, with operands that are views of graph values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch.fx import Node

from ub_overlap.runtime.fp8.numerics import FLOAT8
from ub_overlap.runtime.schedule.steps import ComputeKind

from .aten import Effect, aten, dtype_of, element_effect, shape_of, tensor_of
from .sizes import Size, divide, is_same, is_same_shape, squeezed

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
FLOAT8_MULTIPLE = 16
"""The hardware multiplies float8 matrices whose inner dim and columns divide by this."""

_MATMULS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten._scaled_mm.default)


@dataclass(frozen=True, slots=True)
class Operand:
    """The matrix `node` reshaped to `shape` [rows, cols], then transposed if `is_transposed`.

    `shape` is the shape before the transpose.
    """

    node: Node
    shape: tuple[Size, Size]
    is_transposed: bool = False

    @property
    def t(self) -> Operand:
        """The transposed operand."""
        return replace(self, is_transposed=not self.is_transposed)

    @property
    def rows(self) -> Size:
        """The rows of the matrix as it is multiplied."""
        return self.shape[1] if self.is_transposed else self.shape[0]

    @property
    def cols(self) -> Size:
        """The columns of the matrix as it is multiplied."""
        return self.shape[0] if self.is_transposed else self.shape[1]


@dataclass(frozen=True, slots=True)
class Scales:
    """The scales that float8 operands are multiplied by: per tensor or per row."""

    lhs: Node
    rhs: Node
    rows: bool
    """Whether there is one for each row of lhs [M, 1] and for each column of rhs [1, N]; else one for each tensor."""
    fast: bool
    """Whether the matmul sums in the hardware's fast accumulation."""


@dataclass(frozen=True, slots=True)
class Matmul:
    """lhs [M, K] @ rhs [K, N] (+ bias, which broadcasts to [M, N]), in row-major order the value of `node`."""

    kind: ClassVar[ComputeKind] = ComputeKind.MATMUL
    node: Node
    lhs: Operand
    rhs: Operand
    bias: Node | None = None
    scales: Scales | None = None
    """The scales of float8 operands."""

    @property
    def shape(self) -> tuple[Size, Size]:
        """[M, N]."""
        return self.lhs.rows, self.rhs.cols

    @property
    def inner(self) -> Size:
        """K."""
        return self.lhs.cols


def find_indivisible_size(matmul: Matmul, dynamic: bool = False) -> str:
    """Return which size of a float8 matmul does not divide by `FLOAT8_MULTIPLE`, or "".

    `dynamic`: a dynamic size counts too, unless it certainly divides.
    """
    for what, size in (("inner dim", matmul.inner), ("columns", matmul.shape[1])):
        if (dynamic or isinstance(size, int)) and divide(size, FLOAT8_MULTIPLE) is None:
            return f"{what} {size} do not divide by {FLOAT8_MULTIPLE}"
    return ""


def is_matmul(node: Node) -> bool:
    """Return whether `node` is a matmul of any kind, batched ones included."""
    return node.op == "call_function" and node.target in _MATMULS


def comes_from_matmul(node: Node) -> bool:
    """Return whether `node` is a matmul, or views and casts of one."""
    while not is_matmul(node):
        effect = element_effect(node)
        if effect is None:
            return False
        node = effect.source
    return True


def as_matmul(node: Node) -> Matmul | None:
    """Return the 2D matmul of `node`, or None (no matmul, a true batch, scaled terms, other dtypes)."""
    if not is_matmul(node) or tensor_of(node) is None or dtype_of(node) not in FLOATS:
        return None
    if node.target is aten._scaled_mm.default:
        return _from_scaled_mm(node)
    bias: Node | None = None
    args = list(node.args)
    if node.target is aten.addmm.default:
        if node.kwargs.get("beta", 1) != 1 or node.kwargs.get("alpha", 1) != 1 or len(args) > 3:
            return None
        bias = args.pop(0)  # type: ignore[assignment]
    lhs, rhs = args[:2]
    if not isinstance(lhs, Node) or not isinstance(rhs, Node):
        return None
    if tensor_of(lhs) is None or tensor_of(rhs) is None or not dtype_of(lhs) == dtype_of(rhs) == dtype_of(node):
        return None
    if node.target is aten.bmm.default:
        return _from_bmm(node, lhs, rhs)
    return Matmul(node, Operand(lhs, shape_of(lhs)), Operand(rhs, shape_of(rhs)), bias)  # type: ignore[arg-type]


def _from_scaled_mm(node: Node) -> Matmul | None:
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    args = {a.name: x for a, x in zip(schema, node.args, strict=False)} | dict(node.kwargs)
    lhs, rhs, a, b = (args.get(name) for name in ("self", "mat2", "scale_a", "scale_b"))
    if not all(isinstance(n, Node) for n in (lhs, rhs, a, b)) or args.get("scale_result") is not None:
        return None
    left, right = Operand(lhs, shape_of(lhs)), Operand(rhs, shape_of(rhs))  # type: ignore[arg-type]
    if not {dtype_of(lhs), dtype_of(rhs)} <= set(FLOAT8) or {dtype_of(a), dtype_of(b)} != {torch.float32}:  # type: ignore[arg-type]
        return None
    is_scalar = [all(is_same(s, 1) for s in shape_of(n)) for n in (a, b)]  # type: ignore[arg-type]
    rows = is_same_shape(shape_of(a), (left.rows, 1)) and is_same_shape(shape_of(b), (1, right.cols))  # type: ignore[arg-type]
    if not rows and not all(is_scalar):
        return None
    scales = Scales(a, b, rows and not all(is_scalar), bool(args.get("use_fast_accum", False)))  # type: ignore[arg-type]
    return Matmul(node, left, right, args.get("bias"), scales)  # type: ignore[arg-type]


def _from_bmm(node: Node, lhs: Node, rhs: Node) -> Matmul | None:
    (batch, m, k), n = shape_of(lhs), shape_of(rhs)[2]
    if isinstance(batch, int) and batch == 1:
        return Matmul(node, Operand(lhs, (m, k)), Operand(rhs, (k, n)))
    weight = _broadcast_source(rhs, (k, n))
    return Matmul(node, Operand(lhs, (batch * m, k)), Operand(weight, (k, n))) if weight else None


def _broadcast_source(node: Node, shape: tuple[Size, Size]) -> Node | None:
    """The [K, N] value that `node` repeats along the batch, as F.linear and einsum are traced, or None."""
    while True:
        if node.target is aten.expand.default:
            source = node.args[0]
            assert isinstance(source, Node)
            if is_same_shape(squeezed(shape_of(source)), squeezed(shape)) and _repeats_whole(source, node):
                return source
        step = element_effect(node)
        if step is None or step.kind is not Effect.SAME:
            return None
        node = step.source


def _repeats_whole(source: Node, expand: Node) -> bool:
    """Return whether `expand` repeats all of `source`, one copy after the other. No dim after a real one may be repeated."""
    before, after = shape_of(source), shape_of(expand)
    before = (1,) * (len(after) - len(before)) + before
    repeated = [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if not is_same(a, b)]
    return not repeated or not squeezed(before[: repeated[-1]])

"""Matmuls of several groups, each with a matrix of its own: the experts' grouped matmuls, and batches."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from .aten import aten, dtype_of, node_arg, shape_of
from .sizes import Size

_SCALED = tuple(getattr(aten, n).default for n in ("_scaled_grouped_mm", "_scaled_grouped_mm_v2") if hasattr(aten, n))
_GROUPED = (aten._grouped_mm.default, *_SCALED)
BATCH = ""
"""`divided` of a batch: each of its members has all sizes."""


@dataclass(frozen=True, slots=True)
class GroupedMatmul:
    """`groups` products [m, k] @ [k, n]. `divided`: "m", "n" or "k", the size that the groups share, and that is their sum."""

    groups: Size
    m: Size
    n: Size
    k: Size
    divided: str
    dtype: str
    """Of the operands, without "torch."; "float8" for all its types."""


def is_grouped_matmul(node: Node) -> bool:
    """Return whether `node` multiplies the rows of groups with a matrix of each: experts."""
    return node.op == "call_function" and node.target in _GROUPED


def as_grouped_matmul(node: Node) -> GroupedMatmul | None:
    """Return the sizes of a grouped matmul or of a batch of matmuls (bmm), None for other nodes."""
    if not is_grouped_matmul(node) and (node.op != "call_function" or node.target is not aten.bmm.default):
        return None
    lhs, rhs = node_arg(node, 0), node_arg(node, 1)
    left, right = shape_of(lhs), shape_of(rhs)
    dtype = "float8" if node.target in _SCALED else str(dtype_of(lhs)).removeprefix("torch.")
    m, n, k = left[-2], right[-1], left[-1]
    if len(left) == 3:
        return GroupedMatmul(left[0], m, n, k, "n" if len(right) == 2 else BATCH, dtype)
    if len(right) == 3:
        return GroupedMatmul(right[0], m, n, k, "m", dtype)
    return GroupedMatmul(shape_of(node)[0], m, n, k, "k", dtype)

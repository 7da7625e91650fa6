"""Operations of the ops' matmuls, for torch.utils.flop_counter: those that the graph without our ops counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from . import c10d_fallback as c10d


def count_products(lhs: Sequence[Tensor], rhs: Sequence[Tensor]) -> Any:
    """Return the operations of lhs[j] @ rhs[j] together, symbolic where sizes are."""
    return sum((2 * a.shape[0] * a.shape[1] * b.shape[1] for a, b in zip(lhs, rhs, strict=True)), 0)


def count_gathered(shard: Tensor, operands: Sequence[Tensor], group: str) -> Any:
    """Return the operations of G @ operands[j], or of G^T @ operands[j], where G is gathered from `shard`."""
    gathered = shard.numel() * c10d.group_size(group)
    return sum((2 * gathered * operand.shape[1] for operand in operands), 0)

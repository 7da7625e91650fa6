"""Attention ops of a graph: torch's fused kernels, and FlexAttention.

Their operands are [B, H, S, E], forward (query, key, value, ...), backward also the gradient of the output. Keys and values
may have fewer heads than queries. torch's flop counter knows grouped heads and FlexAttention from 2.12 on only, and no kernel
of the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from ub_overlap import _torch_compat as compat

from .aten import shape_of, tensor_of
from .sizes import Size, is_same, numel

_KERNELS = "aten::_scaled_dot_product_"
_FLEX = ("flex_attention", "flex_attention_backward")


@dataclass(frozen=True, slots=True)
class FusedAttention:
    """One attention of a graph."""

    query: Node
    key: Node
    value: Node
    is_causal: bool
    is_backward: bool
    sparsity: float = 0.0
    """The share of masked blocks that the user states (torch.fx.traceback.annotate({"sparsity_hint": 0.5}))."""

    @property
    def dtype(self) -> torch.dtype:
        """The type of the operands."""
        value = tensor_of(self.query)
        assert value is not None
        return value.dtype

    @property
    def operations(self) -> Size:
        """Operations of the matmuls without a mask."""
        *heads, queries, width = shape_of(self.query)
        keys, value_width = shape_of(self.value)[-2:]
        widths = 3 * width + 2 * value_width if self.is_backward else width + value_width
        return 2 * numel(heads) * queries * keys * widths

    @property
    def share(self) -> float:
        """The share of the operations that the mask leaves. A FlexAttention mask is not known at compile time."""
        if self.is_causal and is_same(shape_of(self.query)[-2], shape_of(self.key)[-2]):
            return 0.5
        return 1.0 - min(1.0, max(0.0, self.sparsity))


def as_attention(node: Node) -> FusedAttention | None:
    """Return the attention that `node` computes, None for other nodes."""
    if node.op != "call_function":
        return None
    if isinstance(node.target, compat.HigherOrderOperator):
        name = node.target.name()
        return _of(node, node.args[:3], False, name == _FLEX[1]) if name in _FLEX else None
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.name.startswith(_KERNELS):
        return None
    arguments = dict(zip((a.name for a in schema.arguments), node.args, strict=False)) | dict(node.kwargs)
    operands = tuple(arguments.get(name) for name in ("query", "key", "value"))
    return _of(node, operands, bool(arguments.get("is_causal", False)), "backward" in schema.name)


def _of(node: Node, operands: tuple[object, ...], is_causal: bool, is_backward: bool) -> FusedAttention | None:
    query, key, value = operands
    for operand in operands:
        if not isinstance(operand, Node) or tensor_of(operand) is None or len(shape_of(operand)) != 4:
            return None
    assert isinstance(query, Node) and isinstance(key, Node) and isinstance(value, Node), node
    sparsity = node.meta.get("custom", {}).get("sparsity_hint", 0.0)
    return FusedAttention(query, key, value, is_causal, is_backward, sparsity)

"""The ops of a graph that compute: matmuls of all kinds, attention, and others whose operations torch counts."""

from __future__ import annotations

from typing import Any

from torch.fx import Node
from torch.utils.flop_counter import flop_registry

from .attention import as_attention
from .grouped_matmul import is_grouped_matmul
from .matmul import is_matmul


def find_flop_formula(target: Any) -> Any:
    """Return torch's formula for the operations of an op, None without one."""
    return flop_registry.get(target) or flop_registry.get(getattr(target, "overloadpacket", None))


def is_compute(node: Node) -> bool:
    """Return whether `node` multiplies matrices or does as much work, as attention does."""
    if node.op != "call_function":
        return False
    has_formula = find_flop_formula(node.target) is not None
    return has_formula or is_matmul(node) or is_grouped_matmul(node) or as_attention(node) is not None

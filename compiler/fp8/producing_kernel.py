"""Which kernel computes a value: one that maps elements, or one that may reduce rows before, as that of a norm does."""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from ub_overlap import _torch_compat as compat

from ..graph.aten import is_elementwise, tensor_of
from ..graph.matmul import is_matmul


def maps_elements(node: Node) -> bool:
    """Return whether each element of `node` is computed from single elements of tensors that are in memory.

    The kernel can then have tiles of two dims and store a transposed copy as well. A kernel that reduces rows cannot: its
    threads hold neighbors of a row, so transposed stores would not be coalesced.
    """
    todo, seen = [node], {node}
    while todo:
        current = todo.pop()
        if _is_in_memory(current):
            continue
        if not is_elementwise(current):
            return False
        for source in current.all_input_nodes:
            if source not in seen and not _is_number(source):
                seen.add(source)
                todo.append(source)
    return True


def _is_number(node: Node) -> bool:
    """Return whether `node` is a tensor without dims, which is in memory, or a size."""
    value = tensor_of(node)
    return isinstance(node.meta.get("val"), int | float | torch.SymInt | torch.SymFloat) if value is None else value.dim() == 0


def _is_in_memory(node: Node) -> bool:
    """Return whether a kernel that is not Inductor's own computes `node`, or none."""
    if node.op != "call_function" or is_matmul(node):
        return True
    if node.target is operator.getitem:
        return _is_in_memory(node.all_input_nodes[0])
    if not isinstance(node.target, compat.OpOverload):
        return False
    return node.target.namespace not in ("aten", "prims") or "attention" in node.target.name()

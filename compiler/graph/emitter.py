"""Emits nodes with values: every node a rewrite makes carries meta["val"] and the trace of the collective it replaces."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node

from ub_overlap import _torch_compat as compat

from .aten import aten, shape_of
from .matmul import Operand
from .sizes import Size, as_sizes, is_same, is_same_shape, numel

SITE = "ub_overlap_site"
"""node.meta key: "<plan digest>/<site id>" of the site that made the node."""
_KEPT_META = ("stack_trace", "nn_module_stack", "source_fn_stack", "from_node", "original_aten", "custom", "seq_nr")


SizeSource = Any
"""int, Node, or a tuple of a target and its parts (see `spelled`)."""


class SizeUnknown(Exception):
    """A symbolic size that no node at hand can produce."""


class Emitter:
    """Adds nodes to `graph` before its insertion point, traced as `origin`.

    `replaced`: what earlier sites replaced by what; matches were made before, so their nodes are looked up in it. `site`: the
    name that the nodes are marked with, if any.
    """

    def __init__(
        self, graph: Graph, origin: Node, replaced: dict[Node, Node], site: str = "", inputs: Sequence[Node] | None = None
    ) -> None:
        """`inputs`: those of `graph` that sizes may be read off; None: all."""
        self.graph = graph
        self._inputs = graph.find_nodes(op="placeholder") if inputs is None else inputs
        self._replaced = replaced
        self._meta = {k: origin.meta[k] for k in _KEPT_META if k in origin.meta} | ({SITE: site} if site else {})
        if compat.is_computed_again(origin.meta.get("recompute")):  # what takes its place is in the user's region too
            self._meta |= {k: origin.meta[k] for k in ("recompute", "ac_graph_id") if k in origin.meta}
        self._mode = compat.fake_mode_of(origin.meta["val"])

    def call(self, target: Any, *args: Any, value_is: Any = None, **kwargs: Any) -> Node:
        """One node. `value_is`: its meta["val"] where that is known (else it is computed on fake tensors, at about 1 ms)."""
        args, kwargs = torch.fx.node.map_arg((args, kwargs), self._now)  # type: ignore[assignment]
        node = self.graph.call_function(target, args, kwargs)
        node.meta.update(self._meta)

        if value_is is not None:
            node.meta["val"] = value_is
            return node

        def value(a: Any) -> Any:
            return a.meta["val"] if isinstance(a, Node) else a

        real_args, real_kwargs = torch.fx.node.map_aggregate((args, kwargs), value)  # type: ignore[misc]
        with self._mode:
            node.meta["val"] = target(*real_args, **real_kwargs)
        return node

    def empty(self, shape: tuple[Size, ...], dtype: torch.dtype, like: Node) -> torch.Tensor | None:
        """A fake contiguous tensor of static `shape` on the device of `like`; None where the shape is dynamic."""
        if not all(isinstance(s, int) for s in shape):
            return None
        with self._mode:
            return torch.empty(shape, dtype=dtype, device=like.meta["val"].device)

    def result(self, shape: tuple[Size, ...], old: Node) -> torch.Tensor | None:
        """The value of an op's output [rows, cols] that takes the place of `old`: old's own where it has that form."""
        val = old.meta["val"]
        if is_same_shape(shape_of(old), shape) and all(isinstance(s, int) for s in shape) and val.is_contiguous():
            return val
        return self.empty(shape, val.dtype, old)

    def _now(self, node: Node) -> Node:
        while node in self._replaced:
            node = self._replaced[node]
        return node

    def item(self, node: Node, index: int) -> Node:
        return self.call(operator.getitem, node, index, value_is=node.meta["val"][index])

    def cast(self, node: Node, dtype: torch.dtype) -> Node:
        if node.meta["val"].dtype == dtype:
            return node
        return self.call(torch.ops.prims.convert_element_type.default, node, dtype)

    def bits(self, node: Node, dtype: torch.dtype) -> Node:
        """One-byte elements read as another one-byte type."""
        return node if node.meta["val"].dtype == dtype else self.call(aten.view.dtype, node, dtype)

    def reshape(self, node: Node, shape: tuple[Size, ...], old: Node | None = None) -> Node:
        """`node` in another shape; `old`: a contiguous node of that shape that it replaces."""
        now = shape_of(node)
        if is_same_shape(now, shape):
            return node
        dims: list[Any] = list(shape)
        symbolic = [i for i, d in enumerate(shape) if not isinstance(d, int)]
        if len(symbolic) == 1 and numel(d for d in shape if isinstance(d, int)) != 0:
            dims[symbolic[0]] = -1
        else:
            dims = [self.size(d) for d in shape]
        known = old.meta["val"] if old is not None and old.meta["val"].is_contiguous() else None
        return self.call(aten.reshape.default, node, dims, value_is=known)

    def permute(self, node: Node, dims: Sequence[int]) -> Node:
        """A permuted copy: contiguous, as the collective's own result would be."""
        turned = self.call(aten.permute.default, node, list(dims))
        return self.call(aten.clone.default, turned, memory_format=torch.contiguous_format)

    def transpose(self, node: Node) -> Node:
        return self.call(aten.permute.default, node, [1, 0])

    def operand(self, op: Operand) -> Node:
        node = self.reshape(op.node, op.shape)
        return self.transpose(node) if op.swapped else node

    def size(self, expr: Size) -> int | Node:
        """`expr` as an int or as a node that computes it from the graph's inputs (never from a site's operand: no circles)."""
        found = find_size_source(self._inputs, expr)
        if found is None:
            raise SizeUnknown(str(expr))
        return self._spell(found)

    def _spell(self, found: SizeSource) -> int | Node:
        if not isinstance(found, tuple):
            return found
        target, *parts = found
        if target is aten.sym_size.int:
            return self.call(target, *parts)
        total = self._spell(parts[0])
        for part in parts[1:]:
            total = self.call(target, total, self._spell(part))
        return total


def find_size_source(inputs: Sequence[Node], expr: Size) -> SizeSource | None:
    """How `expr` is had from `inputs` of a graph: a number, an input, (aten.sym_size.int, input, dim), or (mul or add, parts);
    None where it is not."""
    if isinstance(expr, int):
        return expr
    if expr.is_Integer:
        return int(expr)
    tensors = []
    for node in inputs:
        val = node.meta.get("val")
        if isinstance(val, torch.SymInt) and is_same(as_sizes([val])[0], expr):
            return node
        if isinstance(val, torch.Tensor):
            tensors.append(node)
    for node in tensors:
        for dim, have in enumerate(shape_of(node)):
            if not isinstance(have, int) and is_same(have, expr):
                return aten.sym_size.int, node, dim
    if isinstance(expr, sympy.Mul | sympy.Add):
        parts = [find_size_source(inputs, a) for a in expr.args]
        if None not in parts:
            return operator.mul if isinstance(expr, sympy.Mul) else operator.add, *parts
    return None

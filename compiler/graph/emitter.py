"""Emit graph nodes with meta["val"] and the trace of the collective that they replace."""

from __future__ import annotations

import copy
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from ub_overlap import _torch_compat as compat

from .aten import aten, shape_of
from .joint_graph import AUTOGRAD_BACKWARD, CHECKPOINT_KEYS
from .matmul import Operand
from .size_sources import SizeSource, SizeSources
from .sizes import Size, is_same_shape, numel

SITE = "ub_overlap_site"
"""Key of node.meta: "<plan digest>/<site id>" of the site that the node belongs to."""
_COPIED_META = (
    "stack_trace", "nn_module_stack", "source_fn_stack", "from_node", "original_aten", "custom", "seq_nr", AUTOGRAD_BACKWARD,
)  # fmt: skip


class SizeUnknown(Exception):
    """A symbolic size that cannot be computed from the graph's inputs."""


class Emitter:
    """Adds nodes to `graph` at its insertion point, with the trace of `origin`.

    `replaced`: the replacements of earlier sites. Sites are matched before any is rewritten, so their nodes are looked up
    in it. `site`: the name that the nodes are marked with, if any.
    """

    def __init__(
        self, graph: Graph, origin: Node, replaced: dict[Node, Node], site: str = "", inputs: Sequence[Node] | None = None
    ) -> None:
        """`inputs`: the inputs of `graph` that sizes may be read from; None for all."""
        self.graph = graph
        self._sizes = SizeSources(graph.find_nodes(op="placeholder") if inputs is None else inputs)
        self._replaced = replaced
        self._meta = {k: origin.meta[k] for k in _COPIED_META if k in origin.meta} | ({SITE: site} if site else {})
        if compat.is_computed_again(origin.meta.get("recompute")):  # the replacement is in its checkpoint region too
            self._meta |= {k: origin.meta[k] for k in CHECKPOINT_KEYS if k in origin.meta}
        self._mode = compat.fake_mode_of(origin.meta["val"])

    @property
    def site(self) -> str:
        """The name that nodes are marked with; empty without one."""
        return self._meta.get(SITE, "")

    def marked(self, site: str) -> Emitter:
        """Return an emitter of nodes that are marked with another site."""
        other = copy.copy(self)
        other._meta = self._meta | {SITE: site}
        return other

    def call(self, target: Any, *args: Any, value_is: Any = None, **kwargs: Any) -> Node:
        """Emit one node. `value_is`: its meta["val"] if known; else it is computed on fake tensors, in about 1 ms."""
        args, kwargs = torch.fx.node.map_arg((args, kwargs), self.current)  # type: ignore[assignment]
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

    def empty(self, shape: tuple[Size, ...], dtype: torch.dtype, at: Node | torch.device) -> torch.Tensor | None:
        """Return a fake contiguous tensor of static `shape` on a device, or that of a node; None if the shape is dynamic."""
        if not all(isinstance(s, int) for s in shape):
            return None
        with self._mode:
            return torch.empty(shape, dtype=dtype, device=at.meta["val"].device if isinstance(at, Node) else at)

    def output_value(self, shape: tuple[Size, ...], old: Node) -> torch.Tensor | None:
        """Return the value of an op's output [rows, cols] that replaces `old`: old's own if it has that form."""
        val = old.meta["val"]
        if is_same_shape(shape_of(old), shape) and all(isinstance(s, int) for s in shape) and val.is_contiguous():
            return val
        return self.empty(shape, val.dtype, old)

    def current(self, node: Node) -> Node:
        """Return the replacement of `node` by an earlier site, or `node`."""
        while node in self._replaced:
            node = self._replaced[node]
        return node

    def item(self, node: Node, index: int) -> Node:
        """Emit output `index` of an op."""
        return self.call(operator.getitem, node, index, value_is=node.meta["val"][index])

    def cast(self, node: Node, dtype: torch.dtype) -> Node:
        """Emit a cast, unless `node` has the type."""
        if node.meta["val"].dtype == dtype:
            return node
        return self.call(torch.ops.prims.convert_element_type.default, node, dtype)

    def bitcast(self, node: Node, dtype: torch.dtype) -> Node:
        """Emit a view of one-byte elements as another one-byte type."""
        return node if node.meta["val"].dtype == dtype else self.call(aten.view.dtype, node, dtype)

    def reshape(self, node: Node, shape: tuple[Size, ...], old: Node | None = None) -> Node:
        """Emit `node` in another shape. `old`: the node of that shape that it replaces; its value is reused if contiguous."""
        if is_same_shape(shape_of(node), shape):
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
        """Emit a permuted copy: contiguous, as the collective's own result would be."""
        view = self.call(aten.permute.default, node, list(dims))
        return self.call(aten.clone.default, view, memory_format=torch.contiguous_format)

    def contiguous(self, node: Node) -> Node:
        """Emit a contiguous copy, unless `node` is contiguous."""
        if node.meta["val"].is_contiguous():
            return node
        return self.call(aten.clone.default, node, memory_format=torch.contiguous_format)

    def transpose(self, node: Node) -> Node:
        """Emit the transpose of a matrix, as a view."""
        return self.call(aten.permute.default, node, [1, 0])

    def operand(self, op: Operand) -> Node:
        """Emit the matrix of an operand."""
        node = self.reshape(op.node, op.shape)
        return self.transpose(node) if op.is_transposed else node

    def size(self, expr: Size) -> int | Node:
        """Return `expr` as an int or as a node that computes it.

        It is computed from the graph's inputs, never from a site's operands, so no cycle can occur.
        """
        source = self._sizes.find(expr)
        if source is None:
            raise SizeUnknown(str(expr))
        return self._emit_size(source)

    def _emit_size(self, source: SizeSource) -> Any:
        if not isinstance(source, tuple):
            return source
        target, *sources = source
        return self.call(target, *(sources if target is aten.sym_size.int else map(self._emit_size, sources)))

"""Weights whose float8 casts outlive a call: cast once a step, and not once a microbatch (runtime/fp8/weight_cache/).

    forward    w -> fp8_weight(w) -> q, scale                    cast if w has changed
    backward   w -> fp8_weight(w, after=scale of dy, known=True) -> q, scale     the same memory, as the forward left it

Scales of rows lie otherwise in backward: then it is a cast of its own, that may have to be made.

Both halves ask for themselves: what one hands to the other would count as an intermediate, whose memory torch gives to the next
one. So results may not leave a graph either (`copy_outputs`).
"""

from __future__ import annotations

import operator
from collections.abc import Collection

import torch
from torch.fx import Graph, Node

from ...graph.aten import Effect, c10d, dtype_of, element_effect, shape_of, tensor_of
from ...graph.emitter import Emitter
from ...graph.joint_graph import LAST_REGION, mark_recomputed
from ...graph.matmul import FLOAT8_MULTIPLE
from ..provenance import before
from ..quantized_values import QuantizedValue
from ..recipe import NARROW


class CachedWeights:
    """The weights of one graph. `weights`: its inputs that are parameters, which come again."""

    def __init__(self, weights: Collection[Node]) -> None:
        self._weights = {w for w in weights if _fits(w)}
        self._cast: set[tuple[Node, torch.dtype, int | None]] = set()

    def source(self, value: Node) -> Node | None:
        """The weight that `value` is, or is a cast of to its 16-bit type; None for all others."""
        if value in self._weights:
            return value if dtype_of(value) in NARROW else None
        step = element_effect(value)
        if step is None or step.effect is not Effect.CAST or step.source not in self._weights:
            return None
        return step.source if dtype_of(step.source) is torch.float32 and dtype_of(value) in NARROW else None

    def holds(self, value: Node) -> bool:
        """Are `value`'s elements a weight's, which no gather brought?"""
        here: Node | None = value
        while here is not None:
            if here.target is c10d.wait_tensor.default:
                return False
            if self.source(here) is not None:
                return True
            here = before(here)
        return False

    def twin(self, e: Emitter, value: Node, axis: int | None, after: Node | None) -> QuantizedValue:
        """The kept cast of `value`; `after`: in backward, a node of it."""
        source = self.source(value)
        assert source is not None, "who asks for it has looked"
        which = source, dtype_of(value), axis
        known = after is not None and which in self._cast
        self._cast.add(which)
        cast = e.call(torch.ops.ub_overlap.fp8_weight.default, *which, after, known)
        q, scale = e.item(cast, 0), e.item(cast, 1)
        mark_recomputed((cast, q, scale), LAST_REGION)
        for node in (cast, q, scale):  # also in a region of the user's
            node.meta["ac_graph_id"] = LAST_REGION
        return QuantizedValue(q, scale)


def _fits(weight: Node) -> bool:
    value, shape = weight.meta["val"], shape_of(weight)
    if len(shape) != 2 or not all(isinstance(n, int) and n > 0 and n % FLOAT8_MULTIPLE == 0 for n in shape):
        return False
    return value.is_contiguous() and dtype_of(weight) in (*NARROW, torch.float32)


def copy_outputs(graph: Graph) -> int:
    """Copies kept casts that `graph` returns, as its caller may take them for memory of its own. Returns how many."""
    output = graph.output_node()
    returned = [n for n in output.all_input_nodes if _is_kept(n)]
    for node in returned:
        with graph.inserting_before(output):
            copy = Emitter(graph, node, {}).call(torch.ops.ub_overlap.fp8_kept_copy.default, node)
        output.replace_input_with(node, copy)
    return len(returned)


def _is_kept(node: Node) -> bool:
    op = torch.ops.ub_overlap.fp8_weight.default
    here: Node | None = node
    while here is not None:
        if here.target is operator.getitem and here.all_input_nodes[0].target is op:
            return True
        step = element_effect(here) if tensor_of(here) is not None else None
        here = step.source if step is not None else None
    return False

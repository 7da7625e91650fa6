"""Cached float8 casts of weights: a weight is cast once per step, not once per microbatch (runtime/fp8/weight_cache/).

    forward    w -> fp8_cached_weight(w) -> q, scale                                          casts if w has changed
    backward   w -> fp8_cached_weight(w, after=scale of dy, reuse_forward=True) -> q, scale   the forward's cast

               q -> fp8_cached_weight_transposed(w, q) -> q^T         where a matmul needs that layout

With per-row scales, backward needs scales along the other dim, which is a separate cast.

Weights that multiply one value (q, k, v) are siblings: with per-row scales, their casts of forward lie next to each other in
memory. So packed operands need no copy, in whichever graph they are packed.

Each half of the graph calls the op itself. A cast that forward returned to backward would count as an intermediate, whose
memory torch reuses for the next one. So casts may not be returned from a graph either (`copy_returned_casts`).
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Collection, Iterable

import torch
from torch.fx import Graph, Node

from ...graph.aten import Effect, c10d, dtype_of, element_effect, shape_of, tensor_of
from ...graph.emitter import Emitter
from ...graph.graph_inputs import Neighbors
from ...graph.joint_graph import LAST_REGION, mark_recomputed
from ...graph.matmul import FLOAT8_MULTIPLE, Matmul
from ...graph.operand_source import find_source
from ...graph.sizes import is_same_shape, numel
from ..provenance import element_source, find_origin
from ..quantized_values import QuantizedValue
from ..recipe import NARROW


class CachedWeights:
    """The weights of one graph whose casts are cached. `weights`: its inputs that are parameters."""

    def __init__(self, weights: Collection[Node]) -> None:
        self._weights = {w for w in weights if _can_be_cached(w)}
        self._casts: set[tuple[Node, torch.dtype, int | None]] = set()
        self._siblings: dict[Node, list[Node]] = {}

    def find_weight(self, value: Node) -> Node | None:
        """Return the weight that `value` is, or is a cast of to its 16-bit dtype. Return None for other values."""
        if value in self._weights:
            return value if dtype_of(value) in NARROW else None
        step = element_effect(value)
        if step is None or step.kind is not Effect.CAST or step.source not in self._weights:
            return None
        return step.source if dtype_of(step.source) is torch.float32 and dtype_of(value) in NARROW else None

    def is_from_weight(self, value: Node) -> bool:
        """Return whether the elements of `value` are those of a weight, without a gather between."""
        previous: Node | None = value
        while previous is not None:
            if previous.target is c10d.wait_tensor.default:
                return False
            if self.find_weight(previous) is not None:
                return True
            previous = element_source(previous)
        return False

    def find_siblings(self, matmuls: Iterable[Matmul]) -> None:
        """Find the siblings among the weights of `matmuls`. A weight is in one group: the first."""
        groups: defaultdict[tuple[object, ...], list[Node]] = defaultdict(list)
        for matmul in matmuls:
            source = find_source(matmul.rhs)
            weight = self.find_weight(source.node)
            if weight is not None and source.is_transposed and is_same_shape(source.shape, shape_of(weight)):
                groups[find_origin(matmul.lhs.node), matmul.inner, dtype_of(source.node)].append(weight)
        for group in groups.values():
            weights = list(dict.fromkeys(group))
            if len(weights) > 1 and self._siblings.keys().isdisjoint(weights):
                self._siblings.update(dict.fromkeys(weights, weights))

    def emit_cast(self, e: Emitter, value: Node, axis: int | None, after: Node | None) -> QuantizedValue:
        """Emit the cached cast of `value`. `after`: in backward, the node of it that the cast must follow."""
        weight = self.find_weight(value)
        assert weight is not None, "emit_cast() is called for weights only"
        key = weight, dtype_of(value), axis
        reuse_forward = after is not None and key in self._casts
        self._casts.add(key)
        siblings = self._siblings.get(weight, []) if axis == -1 and after is None else []
        cast = e.call(torch.ops.ub_overlap.fp8_cached_weight.default, *key, after, reuse_forward, siblings)
        q, scale = e.item(cast, 0), e.item(cast, 1)
        mark_recomputed((cast, q, scale), LAST_REGION)
        for node in (cast, q, scale):  # also inside a checkpoint region of the program
            node.meta["ac_graph_id"] = LAST_REGION
        return QuantizedValue(q, scale)


def cast_neighbors(graph: Graph, first_block: int) -> Neighbors:
    """Return the cached casts of siblings, as `GraphInputs.neighbors_in` returns packed parameters.

    `first_block`: the first number that is no block of those.
    """
    blocks: dict[tuple[object, ...], int] = {}
    neighbors: dict[Node, tuple[int, int]] = {}
    for cast in graph.find_nodes(op="call_function", target=torch.ops.ub_overlap.fp8_cached_weight.default):
        weight, round_to, axis, _, _, weights = cast.args
        if not weights:
            continue
        block = blocks.setdefault((*weights, round_to, axis), first_block + len(blocks))
        offset = sum(numel(shape_of(w)) for w in weights[: weights.index(weight)])
        neighbors.update({user: (block, offset) for user in cast.users if user.args[1] == 0})
    return neighbors


def emit_transposed_cast(e: Emitter, q: Node) -> Node | None:
    """Emit the cached transposed copy of `q`, a weight's cached cast or a view of its shape. Return None for others."""
    is_transposed = False
    while (effect := element_effect(q)) is not None and effect.kind in (Effect.SAME, Effect.TRANSPOSE):
        if effect.kind is Effect.SAME and not is_same_shape(shape_of(effect.source), shape_of(q)):
            return None  # a reshaped weight: its transpose is another matrix
        q, is_transposed = effect.source, is_transposed != (effect.kind is Effect.TRANSPOSE)
    cast = q.all_input_nodes[0] if q.target is operator.getitem else q
    if is_transposed or cast.target is not torch.ops.ub_overlap.fp8_cached_weight.default:
        return None
    copy = e.call(torch.ops.ub_overlap.fp8_cached_weight_transposed.default, *cast.args[:3], q)
    mark_recomputed((copy,), LAST_REGION)
    copy.meta["ac_graph_id"] = LAST_REGION
    return copy


def copy_returned_casts(graph: Graph) -> int:
    """Copy the cached casts that `graph` returns, as its caller may reuse their memory. Return their number."""
    output = graph.output_node()
    returned = [n for n in output.all_input_nodes if _is_cached_cast(n)]
    for node in returned:
        with graph.inserting_before(output):
            copy = Emitter(graph, node, {}).call(torch.ops.ub_overlap.fp8_cached_weight_copy.default, node)
        output.replace_input_with(node, copy)
    return len(returned)


def _can_be_cached(weight: Node) -> bool:
    value, shape = weight.meta["val"], shape_of(weight)
    if len(shape) != 2 or not all(isinstance(n, int) and n > 0 and n % FLOAT8_MULTIPLE == 0 for n in shape):
        return False
    return value.is_contiguous() and dtype_of(weight) in (*NARROW, torch.float32)


def _is_cached_cast(node: Node) -> bool:
    op, transposed = torch.ops.ub_overlap.fp8_cached_weight.default, torch.ops.ub_overlap.fp8_cached_weight_transposed.default
    previous: Node | None = node
    while previous is not None:
        if previous.target is transposed or (previous.target is operator.getitem and previous.all_input_nodes[0].target is op):
            return True
        step = element_effect(previous) if tensor_of(previous) is not None else None
        previous = step.source if step is not None else None
    return False

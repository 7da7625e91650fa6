"""Rewrite the 16-bit linears of a joint graph to scaled matmuls of quantized values.

    x bf16 -> all_gather -> view -> mm(., w^T)     x -> quantize -> all_gather(q) -> view -> _scaled_mm(., wq^T, s, ws)
                              |                =>                                     |
                              +-> mm(dy^T, .)      dy -> quantize -> transposed copy -+-> transposed copy -> _scaled_mm

`choose_matmuls.py` decides which matmuls, `quantized_values.py` and `scaled_matmul.py` emit. Every matmul of a linear carries a
`CastDecision` in its joint decision. The plan of its graph lists it, with the reason where it stays in high precision.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from ub_overlap import _torch_compat as compat
from ub_overlap.runtime.fp8.numerics import E4M3

from ...cost.site_sizes import hints_of
from ...graph.aten import aten, dtype_of, shape_of
from ...graph.emitter import Emitter
from ...graph.erase import erase_unread
from ...graph.joint_graph import needs_tangents
from ...graph.source_location import module_path
from ...joint.joint_decision import record_decision
from ..cast_nodes import emit_quantize, emit_scale, emit_transposed_copy, is_cast, is_saved, save_for_backward
from ..producing_kernel import maps_elements
from ..provenance import Axis, find_origin
from ..quantized_values import QuantizedValue, QuantizedValues
from ..state.cached_weights import CachedWeights, emit_transposed_cast
from ..state.delayed_scaling import DelayedScaling
from .choose_matmuls import ChosenMatmuls, choose_matmuls
from .fp8_profitability import Fp8Profitability
from .gather_legality import find_float8_gathers
from .insert_config import InsertConfig
from .linears import Linear, find_linears
from .scaled_matmul import axis_of, axis_of_origin, emit_scaled_matmul, read_dequantized, replace_matmul


def insert_casts(graph: Graph, config: InsertConfig) -> int:
    """Rewrite `graph` in place. Return how many matmuls became scaled ones."""
    backward = needs_tangents(graph)
    linears = find_linears(graph, backward)
    if not linears:
        return 0
    # The forward half must not read sizes from a tangent.
    inputs = [n for n in graph.find_nodes(op="placeholder") if n not in backward]
    chosen = choose_matmuls(linears, config, _profitability(graph, linears, config), inputs)
    for node, decision in chosen.decisions.items():
        record_decision(node, cast=decision)
    if chosen.scaled:
        _CastInserter(graph, config, linears, chosen, backward, inputs).rewrite()
    return len(chosen.scaled)


def _profitability(graph: Graph, linears: list[Linear], config: InsertConfig) -> Fp8Profitability | None:
    if config.profile is None:
        return None
    dtype = str(dtype_of(linears[0].forward.node)).removeprefix("torch.")
    return Fp8Profitability(linears, config.recipe, config.profile, hints_of(graph), dtype, bool(config.cached_weights))


class _CastInserter:
    """Rewrites the chosen matmuls of one graph. `backward`: the nodes of its backward half."""

    def __init__(
        self,
        graph: Graph,
        config: InsertConfig,
        linears: list[Linear],
        chosen: ChosenMatmuls,
        backward: set[Node],
        inputs: list[Node],
    ) -> None:
        self._graph, self._config, self._chosen, self._backward = graph, config, chosen, backward
        self._per_row = config.recipe.per_row
        self._weights = {linear.weight for linear in linears}
        # Of all linears: graphs of the same modules then identify them by the same weights, whichever linears they refuse.
        self._first_weight = {linear.weight.meta["val"].device: linear.weight for linear in reversed(linears)}
        self._cached = CachedWeights(self._weights & set(config.cached_weights))
        if self._per_row:
            self._cached.find_siblings(chosen.scaled[node] for node in sorted(chosen.scaled))
        self._delayed: DelayedScaling | None = None
        if config.recipe.delayed:
            self._delayed = DelayedScaling(graph, inputs, config.state, step=bool(backward))
        gathers = find_float8_gathers(graph, self._scale_axes, chosen.scaled)
        self._values = QuantizedValues(
            graph,
            gathers,
            self._quantize,
            inputs,
            is_cast_per_reader=self._cached.is_from_weight,
            emit_transposed=self._emit_transposed,
        )

    def rewrite(self) -> None:
        graph, values, chosen = self._graph, self._values, self._chosen
        scaled = {
            node: emit_scaled_matmul(chosen.scaled[node], values, self._per_row, chosen.decisions[node])
            for node in sorted(chosen.scaled)
        }
        for reader in sorted(chosen.high_precision):
            read_dequantized(reader, values, self._per_row, shares=lambda value: value not in self._backward)
        for reader in graph.find_nodes(op="call_function", target=aten.sum.dim_IntList):
            read_dequantized(reader, values, self._per_row, shares=lambda value: False)
        for node, result in scaled.items():  # last: a linear may quantize the result of another by its old node
            replace_matmul(graph, node, result, chosen.decisions[node] if self._config.verify else None)
        if self._delayed is not None:
            self._delayed.finish()
        erase_unread(graph, (*scaled, *values.replaced))
        compat.stable_topological_sort(graph)

    def _scale_axes(self, reader: Node, value: Node) -> list[Axis] | None:
        """Return the axes of the quantized values that `reader` needs of `value`. None: it needs `value` itself."""
        matmul = self._chosen.scaled.get(reader)
        if matmul is not None:
            operands = ((matmul.lhs, True), (matmul.rhs, False))
            return [axis_of(o, is_lhs, self._per_row) for o, is_lhs in operands if o.node is value]
        is_bias_gradient = reader.target is aten.sum.dim_IntList and value in self._backward
        if reader in self._chosen.high_precision or is_bias_gradient:
            return [axis_of_origin(value, self._per_row)]
        return None

    def _quantize(self, e: Emitter, value: Node, axis: Axis, groups: tuple[str, ...], after: Node | None) -> QuantizedValue:
        """Emit the cast of `value`: cached, delayed, or by its current values."""
        if not groups and self._cached.find_weight(value) is not None:
            return self._cached.emit_cast(e, value, axis, after)
        is_gradient = value in self._backward
        format = self._config.recipe.gradient_format if is_gradient else E4M3
        if self._delayed is not None and find_origin(value) not in self._weights:
            name = f"{self._module_of_reader()}/{'dy' if is_gradient else 'x'}"
            weight = self._first_weight[value.meta["val"].device]
            return self._delayed.emit_cast(e, value, name, format, groups, weight, backward=is_gradient)
        return self._emit_current_cast(e, value, axis, groups, format)

    def _emit_current_cast(
        self, e: Emitter, value: Node, axis: Axis, groups: tuple[str, ...], format: torch.dtype
    ) -> QuantizedValue:
        scale = emit_scale(e, value, format, None if axis is None else len(shape_of(value)) + axis, groups)
        q = emit_quantize(e, value, scale, format)
        if value in self._weights:  # cast once: backward does not read the 16 bits again
            save_for_backward(q)
        return QuantizedValue(q, scale)

    def _emit_transposed(self, e: Emitter, q: Node) -> Node:
        """Emit a transposed copy of `q`: cached, stored by the kernel that casts, or by one of its own."""
        cached = emit_transposed_cast(e, q)
        if cached is not None:
            return cached
        may_fuse = is_cast(q) and (self._delayed is None or maps_elements(q))
        # A copy that is not saved is a kernel of its own in backward.
        return emit_transposed_copy(e, q, may_fuse, self._delayed is not None and may_fuse and is_saved(q))

    def _module_of_reader(self) -> str:
        decision = self._chosen.decisions.get(self._values.reader)
        return decision.module if decision is not None else module_path(self._values.reader)

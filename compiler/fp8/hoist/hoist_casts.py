"""Move float8 casts from after a gather to before it, in float8 graphs that gather 16 bits.

    x bf16 -> all_gather -> abs -> max -> scale           x -> abs -> max -> all_reduce(max) -> scale
                  |                        |       =>     |                                       |
                  +-> (view) -> * scale -> cast           +-> * scale -> cast -> all_gather -> (view)

    x bf16 -> all_gather -> abs -> amax(rows) -> scale    x -> abs -> amax(rows) -> scale -> all_gather -> (view)
                  |                               |  =>   |                           |
                  +-> (view) -> * scale -> cast           +-> * scale -> cast ------- + ---> all_gather -> (view)

Elementwise and per-row computations commute with a gather. The amax of the tensor, or of a column, is the maximum of the
shards' amaxes. So every number stays the same, except NaN: collectives may drop one from a maximum. Then only its own element
is NaN. The scales must be computed from those amaxes only, as other inputs may differ between ranks.

Casts of a forward gather that only backward reads (float8 by columns) are gathered in backward. If backward reads the 16 bits
(a weight gradient in high precision), backward gathers them again, concurrent with the matmuls that read them, if that is
predicted to be faster (regather_cost.py). If forward needs the 16 bits, the gather stays (hoist_legality.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import Graph, Node

from ub_overlap import _torch_compat as compat
from ub_overlap.runtime.fp8.numerics import FLOAT8

from ...cost.site_sizes import hints_of
from ...graph.aten import aten, c10d, dtype_of, node_arg, shape_of, tensor_of
from ...graph.emitter import Emitter
from ...graph.erase import erase_unread
from ...graph.joint_graph import LAST_REGION, mark_recomputed, needs_tangents
from ...joint.joint_decision import record_decision
from ...plan.reasons import Reason
from ..operand_layout import emit_contiguous_scales
from ..provenance import Axis
from ..quantized_values import Quantize, QuantizedValue, QuantizedValues
from ..recipe import NARROW
from .gather_readers import GatherReaders, Granularity, find_readers
from .hoist_legality import HoistConfig, find_stay_reason
from .rebuild_on_shard import ShardRebuilder


def hoist_casts(graph: Graph, config: HoistConfig) -> int:
    """Rewrite `graph` in place. Return the number of gathers whose casts moved."""
    if not graph.find_nodes(op="call_function", target=aten._scaled_mm.default):
        return 0
    backward = needs_tangents(graph)
    inputs = [n for n in graph.find_nodes(op="placeholder") if n not in backward]
    hints = hints_of(graph)
    count = 0
    for gather in graph.find_nodes(op="call_function", target=c10d.all_gather_into_tensor.default):
        if dtype_of(gather) not in NARROW or not isinstance(gather.args[2], str):
            continue
        readers = find_readers(gather)
        if readers is None:
            continue
        if not readers.casts:
            _record_foreign_casts(readers)
            continue
        if (reason := find_stay_reason(readers, backward, inputs, config, hints)) is not None:
            record_decision(gather, why_unmatched=reason)
            continue
        _GatherHoister(graph, readers, inputs, backward).rewrite()
        if readers.others:
            read = [n for n in (gather, *readers.aliases, *readers.elementwise) if n.users]
            mark_recomputed(read, LAST_REGION)
        count += 1
    if count:
        compat.stable_topological_sort(graph)
    return count


class _GatherHoister:
    """Moves the casts after one gather. `backward`: the nodes of the backward half."""

    def __init__(self, graph: Graph, readers: GatherReaders, inputs: Sequence[Node], backward: set[Node]) -> None:
        self._graph, self._readers, self._inputs, self._backward = graph, readers, inputs, backward
        self._shard, self._group = node_arg(readers.gather), str(readers.gather.args[2])
        self._rebuilder = ShardRebuilder(readers, self._shard, (self._group,))
        self._values: dict[Any, QuantizedValues] = {}
        """By the computation of the cast."""

    def rewrite(self) -> None:
        readers = self._readers
        row_values, needed_row_values = readers.find_row_values()
        row_scales: Node | None = None
        for cast in sorted(readers.casts):
            scaled = readers.casts[cast]
            values = self._values_of(cast, needed_row_values[0] if scaled.is_per_row else scaled.scale)
            gathered = values.get(scaled.alias, -1 if scaled.is_per_row else None)
            row_scales = gathered.scale if scaled.is_per_row else row_scales
            if scaled.granularity is Granularity.COLUMN:
                self._gather_in_backward(cast, values, gathered.q)
            cast.replace_all_uses_with(gathered.q)
        self._replace_amaxes(needed_row_values, row_scales)
        replaced = {node for values in self._values.values() for node in values.replaced}
        unread = (readers.gather, *readers.aliases, *readers.elementwise, *readers.casts, *readers.amaxes)
        erase_unread(self._graph, {*unread, *row_values, *replaced})

    def _values_of(self, cast: Node, scale: Node) -> QuantizedValues:
        """Return the quantized values of `cast`, which equal casts share."""
        key = self._rebuilder.key(cast)
        if key not in self._values:
            gather = self._readers.gather
            quantize = self._quantize_as(cast, scale)
            self._values[key] = QuantizedValues(self._graph, {gather}, quantize, self._inputs, stop_at=(self._shard,))
            self._values[key].reader = gather
        return self._values[key]

    def _quantize_as(self, cast: Node, scale: Node) -> Quantize:
        def quantize(e: Emitter, shard: Node, axis: Axis, groups: tuple[str, ...], after: Node | None) -> QuantizedValue:
            return QuantizedValue(self._rebuilder.rebuild(e, cast), self._rebuilder.rebuild(e, scale))

        return quantize

    def _gather_in_backward(self, cast: Node, values: QuantizedValues, gathered: Node) -> None:
        """Let backward gather a cast that only backward reads: forward then saves the shard."""
        readers = _find_forward_readers(cast, self._backward)
        if readers is not None:
            shard = values.get(self._shard, None, (self._group,)).q
            mark_recomputed(readers | _find_nodes_between(shard, gathered), LAST_REGION)

    def _replace_amaxes(self, needed_row_values: list[Node], row_scales: Node | None) -> None:
        """Redirect readers of amaxes and per-row values of the gathered tensor to those of the shards."""
        gather, amaxes = self._readers.gather, self._readers.amaxes
        with self._graph.inserting_before(gather):
            e = Emitter(self._graph, gather, {}, inputs=self._inputs)
            for amax in sorted(n for n, granularity in amaxes.items() if granularity is not Granularity.ROW):
                amax.replace_all_uses_with(e.reshape(self._rebuilder.rebuild(e, amax), shape_of(amax)))
            for value in needed_row_values if row_scales is not None else ():
                value.replace_all_uses_with(emit_contiguous_scales(e, row_scales, shape_of(value)))  # type: ignore[arg-type]


def _record_foreign_casts(readers: GatherReaders) -> None:
    """Record why no cast after a gather could move."""
    for node in sorted(n for n in readers.others if tensor_of(n) is not None and dtype_of(n) in FLOAT8):
        detail = f"{node.name} stays behind it: scaled by something else than the amax of what it casts"
        record_decision(readers.gather, why_unmatched=(Reason.CAST_IN_BETWEEN, detail))


def _find_forward_readers(cast: Node, backward: set[Node]) -> set[Node] | None:
    """Return the values that forward computes from `cast`. None if forward returns one, or if `cast` is in backward."""
    if cast in backward:
        return None
    readers: set[Node] = set()
    todo = [cast]
    while todo:
        for user in todo.pop().users:
            if user.op == "output":
                return None
            if user not in backward and user not in readers:
                readers.add(user)
                todo.append(user)
    return readers


def _find_nodes_between(first: Node, last: Node) -> set[Node]:
    """Return the nodes that pass the elements of `first` on to `last`, which is one of them."""
    between: set[Node] = set()
    todo = [last]
    while todo:
        node = todo.pop()
        if node is not first and node not in between and node.op == "call_function" and node.target is not aten.sym_size.int:
            between.add(node)
            todo += node.all_input_nodes
    return between

"""Delayed scaling in a joint graph: forward reads the amax histories once, and each cast records its amax.

    fp8_amax_history(weight, keys) -> amax [N] -> all_reduce(max) -> amax [N]      (no all_reduce where nothing is gathered)
                                   -> slots [N]

    for each tensor x      sample = amax of some rows
                           scale = (amax[i] > 0 ? HEADROOM amax[i] : first amax) / F        q = cast(x / scale)
                           fp8_record_amax(scale, q, sample, slots, i) -> the same scale

A cast is plain ATen and its scale is known before. So Inductor casts in the kernel that computes `x`, and stores a transposed
copy there too. The amax comes from `q`, a byte per element: a reduction of `x` in that kernel would cost it both
(docs/performance/float8_casts.md). `q` says nothing about what saturates or underflows, hence the sample. HEADROOM is far more
than `q` is rounded by. A matmul reads the scale that the op returns, so the op is not dropped.

Without a history the scale comes from the sample. For gathered tensors ranks agree on it (fp8_first_amax).

The histories are runtime state (runtime/fp8/amax_history/), not graph values. The graph names them by keys, which a later
compilation of the same model repeats, and by a weight, which differs between modules that share the graph.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, Node

from ub_overlap.runtime.fp8.amax_history import join_keys

from ...graph.aten import aten, shape_of
from ...graph.emitter import Emitter
from ...graph.sizes import Size
from ...joint.joint_decision import record_decision
from ..cast_nodes import (
    emit_finite_amax,
    emit_max_over_ranks,
    emit_quantize_by_finite_scale,
    emit_scale_of_amax,
    recompute_in_backward,
    save_for_backward,
)
from ..quantized_values import QuantizedValue

HEADROOM = 2.0
"""Factor by which a tensor may grow over its history before it saturates. It costs one binade of 18 (e4m3) or 32 (e5m2), and
no bit."""
SAMPLED_ROWS = 320
"""Rows of a sample, at least. For fewer than twice the multiprocessors of a GPU, Inductor may split the reduction into two
kernels."""

UNSAMPLED_AMAX = 2.0**-4
"""Amax to assume without a history where all sampled rows are 0: other rows may not be, as in the gradient of a loss of few
tokens. Formats reach far enough below it for gradients (32 binades) and activations (18). Larger tensors saturate at first."""


@dataclass(frozen=True, slots=True)
class _Sample:
    """The amax [] of sampled rows."""

    amax: Node
    is_whole: bool
    """Whether all rows are sampled."""


@dataclass(slots=True)
class _HistoryNodes:
    """The nodes that read the histories of N tensors."""

    history: Node
    slots: Node
    amax: dict[tuple[str, ...], Node]
    """float32 [N], by the groups whose ranks share scales: () for the rank's own."""
    per_tensor: list[Node]
    """Nodes of shape [N]."""
    keys: list[str] = field(default_factory=list)

    def add(self, key: str) -> None:
        """Add a tensor."""
        self.keys.append(key)
        shape = (len(self.keys),)
        self.history.meta["val"] = tuple(v.new_empty(shape) for v in self.history.meta["val"])
        for node in self.per_tensor:
            node.meta["val"] = node.meta["val"].new_empty(shape)


class DelayedScaling:
    """The delayed casts of one graph.

    `inputs`: the inputs of its forward. `state`: the name of the histories. `step`: whether the graph has gradients.
    """

    def __init__(self, graph: Graph, inputs: Sequence[Node], state: str, step: bool) -> None:
        self._graph, self._inputs, self._state, self._step = graph, inputs, state, step
        self._histories: dict[torch.device, _HistoryNodes] = {}
        self._name_counts: Counter[str] = Counter()

    def emit_cast(
        self, e: Emitter, value: Node, name: str, format: torch.dtype, groups: tuple[str, ...], weight: Node, backward: bool
    ) -> QuantizedValue:
        """Emit the cast of `value` by the history of `name`. The ranks of `groups` share its scale.

        `weight`: the weight of a linear, which identifies the module. `backward`: whether `value` is a gradient.
        """
        count = self._name_counts[name]
        self._name_counts[name] += 1
        history = self._history(value, weight)
        amax = self._shared_amax(history, groups)
        key, index, half = f"{name}#{count}" if count else name, len(history.keys), "backward" if backward else "forward"
        history.add(key)
        sample = self._emit_sample(e, value)
        first = self._emit_first_amax(e, sample, history.slots, index, key, half, groups)
        past = e.call(aten.select.int, amax, 0, index)
        # A saved view is a buffer that Inductor may write the scale to, and cuBLASLt refuses scales not aligned to 16 bytes.
        recompute_in_backward(past)
        expected = e.call(aten.where.self, e.call(aten.gt.Scalar, past, 0), e.call(aten.mul.Tensor, past, HEADROOM), first)
        scale = emit_scale_of_amax(e, expected, format)
        q = emit_quantize_by_finite_scale(e, value, scale, format)
        if self._step:
            quantized, text = None if sample.is_whole else q, join_keys(self._state, [key])
            op = torch.ops.ub_overlap.fp8_record_amax.default
            scale = e.call(op, scale, quantized, sample.amax, history.slots, index, text, half)
            scale.meta.pop("ac_graph_id", None)  # computed again it would record again
            save_for_backward(scale)
        for node in (q, scale):
            if "recompute" not in node.meta:
                save_for_backward(node)
        return QuantizedValue(q, scale)

    def finish(self) -> None:
        """Give the ops that read histories their keys, once all casts are emitted."""
        for history in self._histories.values():
            weight, _, step = history.history.args
            history.history.args = (weight, join_keys(self._state, history.keys), step)

    def _emit_sample(self, e: Emitter, value: Node) -> _Sample:
        """Emit the amax of every nth row of `value`."""
        steps = sample_steps(shape_of(value)[:-1])
        for dim, step in steps.items():
            value = e.call(aten.slice.Tensor, value, dim, 0, sys.maxsize, step)
        return _Sample(emit_finite_amax(e, value), is_whole=not steps)

    def _emit_first_amax(
        self, e: Emitter, sample: _Sample, slots: Node, index: int, key: str, half: str, groups: tuple[str, ...]
    ) -> Node:
        """Emit the amax [] to assume without a history, equal on the ranks of `groups`."""
        amax = sample.amax if sample.is_whole else e.call(aten.mul.Tensor, sample.amax, HEADROOM)
        if not groups:
            is_known = e.call(aten.gt.Scalar, sample.amax, 0)
            return amax if sample.is_whole else e.call(aten.where.ScalarOther, is_known, amax, UNSAMPLED_AMAX)
        op, text = torch.ops.ub_overlap.fp8_first_amax.default, join_keys(self._state, [key])
        return e.call(op, amax, slots, index, text, half if self._step else "never", ";".join(groups))

    def _history(self, value: Node, weight: Node) -> _HistoryNodes:
        device = value.meta["val"].device
        if device not in self._histories:
            first = next(n for n in self._graph.nodes if n.op != "placeholder")
            with self._graph.inserting_before(first):
                e = Emitter(self._graph, value, {}, inputs=self._inputs)
                text = join_keys(self._state, ["?"])
                history = e.call(torch.ops.ub_overlap.fp8_amax_history.default, weight, text, self._step)
                amax, slots = e.item(history, 0), e.item(history, 1)
            for node in (amax, slots):
                save_for_backward(node)
            self._histories[device] = _HistoryNodes(history, slots, {(): amax}, [amax, slots])
        return self._histories[device]

    def _shared_amax(self, history: _HistoryNodes, groups: tuple[str, ...]) -> Node:
        """Return the maxima [N] over the ranks of `groups`: of all tensors, by one all_reduce of each group."""
        if groups not in history.amax:
            own = history.amax[()]
            with self._graph.inserting_after(max(history.per_tensor)):
                nodes = emit_max_over_ranks(Emitter(self._graph, own, {}, inputs=self._inputs), own, groups)[1:]
            for all_reduce in nodes[::2]:
                record_decision(all_reduce, carries_scales=True)
            save_for_backward(nodes[-1])
            history.amax[groups] = nodes[-1]
            history.per_tensor += nodes
        return history.amax[groups]


def sample_steps(rows: Sequence[Size]) -> dict[int, int]:
    """Return by dim of `rows` the step between sampled ones, where it is above 1. SAMPLED_ROWS or more are left.

    Dims of dynamic size are read whole."""
    left = math.prod(n for n in rows if isinstance(n, int)) // SAMPLED_ROWS
    steps = {}
    for dim, n in reversed([*enumerate(rows)]):
        if isinstance(n, int) and (step := min(n, left)) > 1:
            steps[dim], left = step, left // step
    return steps

"""Delayed scaling in a joint graph (EXPERIMENTAL): forward reads the amax histories once, and every cast feeds them.

    fp8_amax_history(weight, keys) -> amax [N] -> all_reduce(max) -> amax [N]      (no all_reduce where nothing is gathered)
                                   -> slots [N]                         |
    x -> fp8_quantize(x, amax, slots, index, key) -> q, scale  <--------+--------> fp8_quantize(dy, ..)

The histories are runtime state (runtime/fp8/amax_history/), not graph values. The graph names them by keys, which a later
compilation of the same model repeats, and by a weight, which differs between modules that share the graph.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, Node

from ub_overlap.runtime.fp8.amax_history import join_keys

from ...graph.emitter import Emitter
from ...joint.joint_decision import record_decision
from ..cast_nodes import emit_max_over_ranks, save_for_backward
from ..quantized_values import QuantizedValue

log = logging.getLogger(__name__)


@functools.cache
def _warn_experimental() -> None:
    log.warning(
        "fp8 recipe 'delayed' is experimental: on 2 H200s it saved 1% of a Llama block's step as CUDA graph, "
        "and an eager 8B block was 14% slower (docs/guide/float8.md)"
    )


@dataclass(slots=True)
class _HistoryNodes:
    """The nodes that compute `amax` of N tensors, and the keys of these tensors."""

    history: Node
    amax: Node
    slots: Node
    per_tensor: list[Node]
    """Nodes of shape [N]."""
    keys: list[str] = field(default_factory=list)


class DelayedScaling:
    """The delayed casts of one graph.

    `inputs`: the inputs of its forward. `state`: the name of the histories. `step`: whether the graph has gradients.
    """

    def __init__(self, graph: Graph, inputs: Sequence[Node], state: str, step: bool) -> None:
        _warn_experimental()
        self._graph, self._inputs, self._state, self._step = graph, inputs, state, step
        self._histories: dict[tuple[torch.device, tuple[str, ...]], _HistoryNodes] = {}
        self._name_counts: Counter[str] = Counter()

    def emit_cast(
        self, e: Emitter, value: Node, name: str, format: torch.dtype, groups: tuple[str, ...], weight: Node, backward: bool
    ) -> QuantizedValue:
        """Emit the cast of `value` by the history of `name`. The ranks of `groups` share its scale.

        `weight`: the weight of a linear, which identifies the module. `backward`: whether `value` is a gradient.
        """
        count = self._name_counts[name]
        self._name_counts[name] += 1
        key = f"{name}#{count}" if count else name
        history = self._history(value, groups, weight)
        text, index = join_keys(self._state, [key]), len(history.keys)
        records_in = "never" if not self._step else "backward" if backward else "forward"
        op = torch.ops.ub_overlap.fp8_quantize.default
        cast = e.call(op, value, history.amax, history.slots, index, text, format, records_in, ";".join(groups))
        history.keys.append(key)
        q, scale = e.item(cast, 0), e.item(cast, 1)
        for node in (q, scale):
            if "recompute" not in node.meta:  # in a checkpoint region of the program a second cast records the same amax
                save_for_backward(node)
        return QuantizedValue(q, scale)

    def set_history_keys(self) -> None:
        """Give the ops that read histories their keys, once all casts are emitted."""
        for history in self._histories.values():
            weight, _, step = history.history.args
            history.history.args = (weight, join_keys(self._state, history.keys), step)
            n = len(history.keys)
            history.history.meta["val"] = tuple(v.new_empty((n,)) for v in history.history.meta["val"])
            for node in history.per_tensor:
                node.meta["val"] = node.meta["val"].new_empty((n,))

    def _history(self, value: Node, groups: tuple[str, ...], weight: Node) -> _HistoryNodes:
        device = value.meta["val"].device
        if (device, groups) not in self._histories:
            first = next(n for n in self._graph.nodes if n.op != "placeholder")
            with self._graph.inserting_before(first):
                e = Emitter(self._graph, value, {}, inputs=self._inputs)
                text = join_keys(self._state, ["?"])
                history = e.call(torch.ops.ub_overlap.fp8_amax_history.default, weight, text, self._step)
                nodes = emit_max_over_ranks(e, e.item(history, 0), groups)
                for all_reduce in nodes[1::2]:
                    record_decision(all_reduce, carries_scales=True)
                slots = e.item(history, 1)
            for node in (nodes[-1], slots):
                save_for_backward(node)
            self._histories[device, groups] = _HistoryNodes(history, nodes[-1], slots, [*nodes, slots])
        return self._histories[device, groups]

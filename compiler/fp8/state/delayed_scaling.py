"""Delayed scales in a joint graph: histories are read once, where the forward begins, and fed by every cast.

    fp8_history(weight, keys) -> maxima [N] -> all_reduce(max) -> most [N]       (no all_reduce where nothing is gathered)
                              -> columns [N]                        |
    x -> fp8_quantise(x, most, columns, at, key) -> q, scale  <-----+---> fp8_quantise(dy, ..)

What the ops remember is not in the graph (runtime/fp8/amax_history/): the graph tells them which histories by keys that a later
compilation of the same model gives again, and by a weight, which differs between modules that share the graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, Node

from ub_overlap.runtime.fp8.amax_history import text_of

from ...graph.emitter import Emitter
from ...joint.joint_decision import record_decision
from ..cast_nodes import keep, over_ranks
from ..quantized_values import QuantizedValue


@dataclass(slots=True)
class _Chain:
    """The nodes that bring `most` about, and the keys of its N tensors."""

    history: Node
    most: Node
    columns: Node
    nodes: list[Node]
    keys: list[str] = field(default_factory=list)


class Delayed:
    """Casts of one graph. `inputs`: of its forward; `state`: names the histories; `step`: does it have gradients?"""

    def __init__(self, graph: Graph, inputs: Sequence[Node], state: str, step: bool) -> None:
        self._graph, self._inputs, self._state, self._step = graph, inputs, state, step
        self._chains: dict[tuple[torch.device, tuple[str, ...]], _Chain] = {}
        self._named: Counter[str] = Counter()

    def twin(
        self, e: Emitter, value: Node, name: str, format: torch.dtype, groups: tuple[str, ...], weight: Node, backward: bool
    ) -> QuantizedValue:
        """`value` cast by the history of `name`; the ranks of `groups` cast by the same scale. `weight`: a linear's, that
        tells the module; `backward`: is `value` a gradient?"""
        again = self._named[name]
        self._named[name] += 1
        key = f"{name}#{again}" if again else name
        chain = self._chain(value, groups, weight)
        text, at = text_of(self._state, [key]), len(chain.keys)
        notes = "never" if not self._step else "backward" if backward else "forward"
        op = torch.ops.ub_overlap.fp8_quantise.default
        cast = e.call(op, value, chain.most, chain.columns, at, text, format, notes, ";".join(groups))
        chain.keys.append(key)
        q, scale = e.item(cast, 0), e.item(cast, 1)
        for node in (q, scale):
            if "recompute" not in node.meta:  # in a region that the user checkpoints: casting again notes nothing new
                keep(node)
        return QuantizedValue(q, scale)

    def finish(self) -> None:
        """Tells the reading ops which histories they are of, now that all are known."""
        for chain in self._chains.values():
            weight, _, step = chain.history.args
            chain.history.args = (weight, text_of(self._state, chain.keys), step)
            n = len(chain.keys)
            chain.history.meta["val"] = tuple(v.new_empty((n,)) for v in chain.history.meta["val"])
            for node in chain.nodes:
                node.meta["val"] = node.meta["val"].new_empty((n,))

    def _chain(self, value: Node, groups: tuple[str, ...], weight: Node) -> _Chain:
        device = value.meta["val"].device
        if (device, groups) not in self._chains:
            first = next(n for n in self._graph.nodes if n.op != "placeholder")
            with self._graph.inserting_before(first):
                e = Emitter(self._graph, value, {}, inputs=self._inputs)
                text = text_of(self._state, ["?"])
                history = e.call(torch.ops.ub_overlap.fp8_history.default, weight, text, self._step)
                nodes = over_ranks(e, e.item(history, 0), groups)
                for reduced in nodes[1::2]:
                    record_decision(reduced, carries_scales=True)
                columns = e.item(history, 1)
            for node in (nodes[-1], columns):
                keep(node)
            self._chains[device, groups] = _Chain(history, nodes[-1], columns, [*nodes, columns])
        return self._chains[device, groups]

"""Delayed scales in a joint graph: histories are read once, where the forward begins, and fed by every cast.

    fp8_seen(keys) -> all_reduce(max) -> fp8_history(keys) -> most [N]       (no all_reduce where nothing is gathered)
                                                                |
    x -> fp8_quantise(x, most, at, key) -> q, scale  <----------+---> fp8_quantise(dy, ..)

What the ops remember is not in the graph (runtime/magnitudes.py): the graph tells them which histories by keys that a later
compilation of the same model gives again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, Node

from ub_overlap.runtime.magnitudes import text_of

from ..rewrite.emit import Emitter
from ..sites.scales import SCALES
from ..sites.values import tensor_of
from .origin import c10d
from .quantise import keep
from .twins import Twin


@dataclass(slots=True)
class _Chain:
    """The nodes that bring `most` about, and the keys of its N tensors."""

    seen: Node
    most: Node
    nodes: list[Node]
    keys: list[str] = field(default_factory=list)


class Delayed:
    """Casts of one graph. `inputs`: of its forward; `state`: names the histories."""

    def __init__(self, graph: Graph, inputs: Sequence[Node], state: str) -> None:
        self._graph, self._inputs, self._state = graph, inputs, state
        self._chains: dict[tuple[torch.device, tuple[str, ...]], _Chain] = {}
        self._named: Counter[str] = Counter()

    def twin(self, e: Emitter, value: Node, name: str, format: torch.dtype, groups: tuple[str, ...]) -> Twin:
        """`value` cast by the history of `name`; the ranks of `groups` cast by the same scale."""
        again = self._named[name]
        self._named[name] += 1
        key = f"{name}#{again}" if again else name
        chain = self._chain(value, groups)
        op = e.call(
            torch.ops.ub_overlap.fp8_quantise.default, value, chain.most, len(chain.keys), text_of(self._state, [key]), format
        )
        chain.keys.append(key)
        q, scale = e.item(op, 0), e.item(op, 1)
        for node in (q, scale):
            keep(node)
        return Twin(q, scale)

    def finish(self) -> None:
        """Tells the reading ops which histories they are of, now that all are known."""
        for chain in self._chains.values():
            text = text_of(self._state, chain.keys)
            chain.seen.args = (chain.seen.args[0], text)
            chain.most.args = (chain.most.args[0], text)
            for node in chain.nodes:
                node.meta["val"] = node.meta["val"].new_empty((len(chain.keys),))

    def _chain(self, value: Node, groups: tuple[str, ...]) -> _Chain:
        device = value.meta["val"].device
        if (device, groups) not in self._chains:
            like = next(n for n in self._inputs if (val := tensor_of(n)) is not None and val.device == device)
            first = next(n for n in self._graph.nodes if n.op != "placeholder")
            with self._graph.inserting_before(first):
                e = Emitter(self._graph, value, {}, inputs=self._inputs)
                nodes = [seen := e.call(torch.ops.ub_overlap.fp8_seen.default, like, text_of(self._state, ["?"]))]
                for group in groups:
                    reduced = e.call(c10d.all_reduce.default, nodes[-1], "max", group)
                    reduced.meta[SCALES] = True
                    nodes += [reduced, e.call(c10d.wait_tensor.default, reduced)]
                most = e.call(torch.ops.ub_overlap.fp8_history.default, nodes[-1], text_of(self._state, ["?"]))
                keep(most)
            self._chains[device, groups] = _Chain(seen, most, [*nodes, most])
        return self._chains[device, groups]

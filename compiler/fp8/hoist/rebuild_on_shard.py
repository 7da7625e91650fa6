"""What readers of a gather compute, computed on the shard instead: each computation once."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from ...graph.aten import Effect, aten, dtype_of, element_effect, node_arg, shape_of
from ...graph.emitter import Emitter
from ..cast_nodes import over_ranks
from .gather_readers import GatherReaders, Granularity


class ShardRebuilder:
    """`shard`: what `found.gather` gathers. `groups`: whose ranks have shards."""

    def __init__(self, found: GatherReaders, shard: Node, groups: tuple[str, ...]) -> None:
        self._found, self._shard, self._groups = found, shard, groups
        self._made: dict[Any, Node] = {}
        self._keys: dict[Node, Any] = {}

    def key(self, x: Any) -> Any:
        """Equal for equal computations, whichever form of the gathered elements they read."""
        if not isinstance(x, Node):
            return tuple(map(self.key, x)) if isinstance(x, list | tuple) else (type(x).__name__, x)
        if x in self._found.holders:
            return "elements"
        if x not in self._keys:
            if (lines := self._found.maxima.get(x)) is not None:
                self._keys[x] = lines, x.target, self.key(x.args[0])
            elif (viewed := self._viewed(x)) is not None:
                self._keys[x] = self.key(viewed)
            else:
                named = tuple((name, self.key(value)) for name, value in sorted(x.kwargs.items()))
                self._keys[x] = (x.target, self.key(x.args), named)
        return self._keys[x]

    def on(self, e: Emitter, node: Node) -> Node:
        """`node`, of the elements of the shard: the largest of all and of columns are those over the ranks."""
        if node in self._found.holders:
            return self._shard
        key = self.key(node)
        if key not in self._made:
            self._made[key] = self._make(e, node)
        return self._made[key]

    def _make(self, e: Emitter, node: Node) -> Node:
        lines = self._found.maxima.get(node)
        if lines is None:
            if (viewed := self._viewed(node)) is not None:
                return self.on(e, viewed)
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: self.on(e, n))
            return e.call(node.target, *args, **kwargs)
        x = self.on(e, node_arg(node))
        dims = list(range(len(shape_of(x))))
        if lines is Granularity.ROWS:
            return e.call(aten.amax.default, x, dims[-1:], True)
        value = e.call(node.target, x) if lines is Granularity.ALL else e.call(aten.amax.default, x, dims[:-1], True)
        # In float32 on the way, which every backend compares.
        return e.cast(over_ranks(e, e.cast(value, torch.float32), self._groups)[-1], dtype_of(value))

    def _viewed(self, node: Node) -> Node | None:
        """What `node` is a view of, of values of rows: on the shard they keep the shard's shape."""
        step = element_effect(node)
        if step is None or step.effect is not Effect.SAME or self._found.lines(node) is not Granularity.ROWS:
            return None
        return step.source

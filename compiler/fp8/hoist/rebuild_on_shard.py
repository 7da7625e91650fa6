"""Rebuild on the shard the values that readers compute from a gather's result. Each value is emitted once."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from ...graph.aten import Effect, aten, dtype_of, element_effect, node_arg, shape_of
from ...graph.emitter import Emitter
from ..cast_nodes import emit_max_over_ranks
from .gather_readers import GatherReaders, Granularity


class ShardRebuilder:
    """Emits nodes on `shard`, which `readers.gather` gathers. `groups`: the process groups that hold the shards."""

    def __init__(self, readers: GatherReaders, shard: Node, groups: tuple[str, ...]) -> None:
        self._readers, self._shard, self._groups = readers, shard, groups
        self._emitted: dict[Any, Node] = {}
        self._keys: dict[Node, Any] = {}

    def key(self, x: Any) -> Any:
        """Return a key that is equal for equal computations, whichever alias of the gathered elements they read."""
        if not isinstance(x, Node):
            return tuple(map(self.key, x)) if isinstance(x, list | tuple) else (type(x).__name__, x)
        if x in self._readers.aliases:
            return "elements"
        if x not in self._keys:
            if (granularity := self._readers.amaxes.get(x)) is not None:
                self._keys[x] = granularity, x.target, self.key(x.args[0])
            elif (base := self._row_view_base(x)) is not None:
                self._keys[x] = self.key(base)
            else:
                kwargs = tuple((name, self.key(value)) for name, value in sorted(x.kwargs.items()))
                self._keys[x] = (x.target, self.key(x.args), kwargs)
        return self._keys[x]

    def rebuild(self, e: Emitter, node: Node) -> Node:
        """Emit `node`, of the shard's elements. Per-tensor and per-column amax values are maxima over the ranks."""
        if node in self._readers.aliases:
            return self._shard
        key = self.key(node)
        if key not in self._emitted:
            self._emitted[key] = self._emit(e, node)
        return self._emitted[key]

    def _emit(self, e: Emitter, node: Node) -> Node:
        granularity = self._readers.amaxes.get(node)
        if granularity is None:
            if (base := self._row_view_base(node)) is not None:
                return self.rebuild(e, base)
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: self.rebuild(e, n))
            return e.call(node.target, *args, **kwargs)
        x = self.rebuild(e, node_arg(node))
        dims = list(range(len(shape_of(x))))
        if granularity is Granularity.ROW:
            return e.call(aten.amax.default, x, dims[-1:], True)
        is_per_tensor = granularity is Granularity.TENSOR
        amax = e.call(node.target, x) if is_per_tensor else e.call(aten.amax.default, x, dims[:-1], True)
        # All backends reduce float32.
        return e.cast(emit_max_over_ranks(e, e.cast(amax, torch.float32), self._groups)[-1], dtype_of(amax))

    def _row_view_base(self, node: Node) -> Node | None:
        """Return the base of the view `node` if it holds one value per row: on the shard such values keep the shard's shape."""
        step = element_effect(node)
        if step is None or step.kind is not Effect.SAME or self._readers.granularity(node) is not Granularity.ROW:
            return None
        return step.source

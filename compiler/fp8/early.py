"""Casts that stand behind a gather move before it: graphs that are float8 already, with gathers that are not.

    x bf16 -> all_gather -> abs -> max -> scale           x -> abs -> max -> all_reduce(max) -> scale
                  |                        |       =>     |                                       |
                  +-> (view) -> * scale -> cast           +-> * scale -> cast -> all_gather -> (view)

What is computed element by element commutes with a gather, and the largest of all magnitudes is the largest of the shards'
ones: every number stays. A NaN alone may not: collectives may drop it from a maximum, and then only its own element is one.
It needs every reader of the gathered elements to be such a cast or such a maximum, and scales that are computed from those
maxima alone: others need not be the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from ub_overlap import _torch_compat as compat

from ..cost.of_site import hints_of
from ..joint import needs_tangents
from ..rewrite.emit import Emitter
from ..sites.sizes import number_of, product, same_shape
from ..sites.values import CASTS, CUTS, Effect, aten, dtype_of, effect, readers, shape_of, tensor_of
from .origin import Axis, before, c10d
from .quantise import over_ranks
from .recipe import FLOAT8, NARROW
from .twins import Quantise, Twin, Twins, erase

_MAXIMA = (aten.max.default, aten.amax.default)


@dataclass(slots=True)
class _Readers:
    """Who reads the elements of one gather. `holders` have them as they are, `inside` is computed of them one by one; `casts`
    are the float8 ends, `maxima` the largest of all."""

    holders: set[Node]
    inside: set[Node] = field(default_factory=set)
    casts: list[Node] = field(default_factory=list)
    maxima: set[Node] = field(default_factory=set)


def cast_before_gathers(graph: Graph, least_bytes: int) -> int:
    """Rewrites in place; returns of how many gathers. Those whose rank sends less than `least_bytes` stay: the scale's own
    collective would take longer than what is saved."""
    if not graph.find_nodes(op="call_function", target=aten._scaled_mm.default):
        return 0
    tangents = needs_tangents(graph)
    inputs = [n for n in graph.find_nodes(op="placeholder") if n not in tangents]
    hints = hints_of(graph)
    count = 0
    for gather in graph.find_nodes(op="call_function", target=c10d.all_gather_into_tensor.default):
        if dtype_of(gather) not in NARROW or not isinstance(gather.args[2], str):
            continue
        shard = number_of(product(shape_of(gather.all_input_nodes[0])), hints)
        sent = None if shard is None else shard * dtype_of(gather).itemsize * (int(gather.args[1]) - 1)  # type: ignore[call-overload]
        if sent is not None and sent < least_bytes:
            continue
        if (found := _readers_of(gather)) is not None:
            _move(graph, gather, found, inputs)
            count += 1
    if count:
        compat.stable_topological_sort(graph)
    return count


def _readers_of(gather: Node) -> _Readers | None:
    """None where somebody needs the 16 bits, or scales by something else."""
    waits = readers(gather)
    if len(waits) != 1 or waits[0].target is not c10d.wait_tensor.default:
        return None
    found = _Readers({waits[0]})
    todo = [waits[0]]
    while todo:
        node = todo.pop()
        for user in readers(node):
            if user in found.holders or user in found.inside or user in found.maxima or user in found.casts:
                continue
            if node in found.holders and _hands_on(user, node, found.holders):
                found.holders.add(user)
                todo.append(user)
            elif node in found.holders and not _whole(node, waits[0]):
                return None
            elif _pointwise(user, node) and dtype_of(user) in FLOAT8:
                found.casts.append(user)
            elif _pointwise(user, node):
                found.inside.add(user)
                todo.append(user)
            elif user.target in _MAXIMA and not user.kwargs and not shape_of(user):
                found.maxima.add(user)
            else:
                return None
    scales = [n for user in (*found.inside, *found.casts) for n in user.all_input_nodes if not shape_of(n)]
    good = found.casts and all(_of(scale, found.maxima) for scale in scales)
    return found if good and all(_scaled(cast, found.holders)[1] for cast in found.casts) else None


def _whole(node: Node, wait: Node) -> bool:
    """Are all gathered elements in `node`, and not a part that a cut made?"""
    here: Node | None = node
    while here is not None and here is not wait:
        here = before(here) if tensor_of(here) is not None else None
    return here is wait


def _hands_on(user: Node, node: Node, holders: set[Node]) -> bool:
    """Is `user` the same elements in another form, or a step of cutting and joining them?"""
    if user.target in CUTS or node.target in CUTS or user.target is aten.slice.Tensor:
        return True
    if user.target is aten.cat.default:
        return before(user) in holders
    step = effect(user)
    return step is not None and step.source is node and step.effect in (Effect.SAME, Effect.SWAP)


def _pointwise(user: Node, node: Node) -> bool:
    """Is `user` computed of `node` element by element, with numbers and scales [] beside it?"""
    if tensor_of(node) is None or tensor_of(user) is None or not isinstance(user.target, compat.OpOverload):
        return False
    if not _of_elements(user.target):
        return False
    others = [n for n in user.all_input_nodes if n is not node]
    plain = all(tensor_of(n) is not None and not shape_of(n) for n in others)
    return plain and not user.target._schema.is_mutable and same_shape(shape_of(user), shape_of(node))


def _of_elements(target: Any) -> bool:
    """Does an op compute each element by itself, and always the same?"""
    return target in CASTS or (torch.Tag.pointwise in target.tags and torch.Tag.nondeterministic_seeded not in target.tags)


def _of(scale: Node, maxima: set[Node]) -> bool:
    """Is `scale` [] computed from `maxima` and numbers alone?"""
    if scale in maxima:
        return True
    if scale.op != "call_function" or not isinstance(scale.target, compat.OpOverload):
        return False
    if not _of_elements(scale.target):
        return False
    inputs = scale.all_input_nodes
    return bool(inputs) and all(tensor_of(n) is not None and not shape_of(n) and _of(n, maxima) for n in inputs)


def _scaled(cast: Node, holders: set[Node]) -> tuple[Node, Node | None]:
    """(the gathered elements that `cast` is computed of, the last thing that they are scaled by)."""
    node, scale = cast, None
    while node not in holders:
        inputs = node.all_input_nodes
        scale = scale or next((n for n in inputs if not shape_of(n)), None)
        node = next(n for n in inputs if shape_of(n))
    return node, scale


class _Rebuilt:
    """What readers of a gather compute, computed on something else: each computation once."""

    def __init__(self, found: _Readers) -> None:
        self._found = found
        self._made: dict[Any, Node] = {}
        self._keys: dict[Node, Any] = {}

    def key(self, x: Any) -> Any:
        """Equal for equal computations, whichever form of the gathered elements they read."""
        if not isinstance(x, Node):
            return tuple(map(self.key, x)) if isinstance(x, list | tuple) else (type(x).__name__, x)
        if x in self._found.holders:
            return "elements"
        if x not in self._keys:
            named = tuple((name, self.key(value)) for name, value in sorted(x.kwargs.items()))
            self._keys[x] = (x.target, self.key(x.args), named)
        return self._keys[x]

    def on(self, e: Emitter, shard: Node, node: Node, groups: tuple[str, ...]) -> Node:
        """`node`, of the elements of `shard` and the maxima over `groups`."""
        if node in self._found.holders:
            return shard
        key = shard, groups, self.key(node)
        if key not in self._made:
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: self.on(e, shard, n, groups))
            if node.target is aten.amax.default:
                args = args[:1]
            value = e.call(node.target, *args, **kwargs)
            if node in self._found.maxima:
                value = _of_all(e, value, groups)
            self._made[key] = value
        return self._made[key]


def _of_all(e: Emitter, maximum: Node, groups: tuple[str, ...]) -> Node:
    """The largest over the ranks, in float32 on the way, which every backend compares."""
    dtype = dtype_of(maximum)
    return e.cast(over_ranks(e, e.cast(maximum, torch.float32), groups)[-1], dtype)


def _move(graph: Graph, gather: Node, found: _Readers, inputs: Sequence[Node]) -> None:
    rebuilt = _Rebuilt(found)
    twins: dict[Any, Twins] = {}
    sources: dict[Node, tuple[str, ...]] = {}
    dead = {gather, *found.holders, *found.inside, *found.casts, *found.maxima}

    def quantise(cast: Node, scale: Node) -> Quantise:
        def run(e: Emitter, shard: Node, axis: Axis, groups: tuple[str, ...]) -> Twin:
            sources[shard] = groups
            return Twin(rebuilt.on(e, shard, cast, groups), rebuilt.on(e, shard, scale, groups))

        return run

    for cast in sorted(found.casts):
        key = rebuilt.key(cast)
        holder, scale = _scaled(cast, found.holders)
        assert scale is not None, "_readers_of saw to it"
        if key not in twins:
            twins[key] = Twins(graph, {gather}, quantise(cast, scale), inputs)
            twins[key].reader = gather
        cast.replace_all_uses_with(twins[key].of(holder, None).q)
        dead |= twins[key].replaced
    ((shard, groups),) = sources.items()
    with graph.inserting_before(gather):
        e = Emitter(graph, gather, {}, inputs=inputs)
        for maximum in sorted(found.maxima):
            maximum.replace_all_uses_with(rebuilt.on(e, shard, maximum, groups))
    erase(graph, dead)

"""Classify the readers of an all_gather: float8 casts that could move before it, and others.

    x -> all_gather -> (views) -> abs -> amax -> scale         amaxes, and values computed from them only
                          |                        |
                          +-> (elementwise) -> * scale -> cast       casts
                          +-> mm, ...                                others: they need the 16 bits

A scale belongs to the tensor [], to each row [.., 1] or to each column [1, .., c] of the gathered elements (`Granularity`).
Shards are whole rows. So the amax of a row is known on its shard; that of the tensor or a column is a maximum over the shards.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import torch
from torch.fx import Node

from ub_overlap import _torch_compat as compat
from ub_overlap.runtime.fp8.numerics import FLOAT8

from ...graph.aten import CASTS, Effect, aten, c10d, dtype_of, element_effect, readers, shape_of, tensor_of
from ...graph.sizes import is_same, is_same_shape
from ..provenance import carries_elements, element_source, step_to_source

_AMAX_OPS = (aten.max.default, aten.amax.default)
_EXACT_IN_FLOAT32 = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes whose values float32 represents: amax values are reduced over ranks in float32."""
_MAX_STEPS = 24
"""Steps from a scale back to its amax: torchao's are 12."""


class Granularity(Enum):
    """The part of a tensor that shares one scale."""

    TENSOR = auto()
    ROW = auto()
    COLUMN = auto()


@dataclass(frozen=True, slots=True)
class ScaledCast:
    """A cast of the elements of `alias`, whose last factor is `scale`.

    `granularity`: ROW where any of its scales is per row, else COLUMN where any is per column.
    """

    alias: Node
    scale: Node
    granularity: Granularity

    @property
    def is_per_row(self) -> bool:
        return self.granularity is Granularity.ROW


@dataclass(slots=True)
class GatherReaders:
    """The readers of one gather."""

    gather: Node
    wait: Node
    aliases: set[Node]
    """Nodes that hold the gathered elements."""
    elementwise: dict[Node, Node] = field(default_factory=dict)
    """Nodes computed from them element by element, with the alias that they read."""
    casts: dict[Node, ScaledCast] = field(default_factory=dict)
    """The float8 casts that could move."""
    amaxes: dict[Node, Granularity] = field(default_factory=dict)
    others: set[Node] = field(default_factory=set)
    row_order: Node | None = None
    """The first alias whose rows are in the order that per-row scales are in."""

    def granularity(self, value: Node, depth: int = _MAX_STEPS) -> Granularity | None:
        """Return the granularity of `value`. None unless it is computed from numbers and amaxes of one granularity only."""
        if value in self.amaxes:
            return self.amaxes[value]
        if depth == 0 or value.op != "call_function" or tensor_of(value) is None or not _has_scale_shape(value):
            return None
        step = element_effect(value)
        if step is not None and step.kind is Effect.SAME and self.granularity(step.source, depth - 1) is Granularity.ROW:
            return Granularity.ROW  # the rows in order, in another shape
        if not isinstance(value.target, compat.OpOverload) or not _is_elementwise(value.target):
            return None
        inputs = value.all_input_nodes
        if not all(tensor_of(n) is not None and is_same_shape(shape_of(n), shape_of(value)) for n in inputs):
            return None
        kinds = {self.granularity(n, depth - 1) for n in inputs}
        return kinds.pop() if len(kinds) == 1 else None

    def find_row_values(self) -> tuple[set[Node], list[Node]]:
        """Return (values that are per row, those of them that are needed after the gather: another reader uses them)."""
        todo = [n for n, granularity in self.amaxes.items() if granularity is Granularity.ROW]
        seen: set[Node] = set(todo)
        needed: list[Node] = []
        while todo:
            node = todo.pop()
            for user in readers(node):
                if self.granularity(user) is Granularity.ROW:
                    if user not in seen:
                        seen.add(user)
                        todo.append(user)
                elif user not in self.casts and user not in self.elementwise and node not in needed:
                    needed.append(node)
        return seen, needed


def find_readers(gather: Node) -> GatherReaders | None:
    """Return the readers of `gather`, or None where it does not have exactly one wait."""
    waits = readers(gather)
    if len(waits) != 1 or waits[0].target is not c10d.wait_tensor.default:
        return None
    users = GatherReaders(gather, waits[0], {waits[0]})
    for cast in _classify(users):
        scaled = _match_scaled_cast(cast, users)
        if scaled is not None:
            users.casts[cast] = scaled
        else:
            users.others.add(cast)
    _keep_needed_amaxes(users)
    return users


def _classify(users: GatherReaders) -> list[Node]:
    """Fill aliases, elementwise, amaxes and others of `users`. Return the nodes that are cast to float8."""
    casts: list[Node] = []
    todo = [users.wait]
    while todo:
        node = todo.pop()
        for user in readers(node):
            if user in users.aliases or user in users.elementwise or user in users.amaxes or user in casts:
                continue
            is_alias = node in users.aliases
            if is_alias and carries_elements(user, node, users.aliases, exact=True):
                users.aliases.add(user)
                todo.append(user)
            elif is_alias and not _has_all_elements(node, users.wait):
                users.others.add(user)
            elif _is_elementwise_of(user, node):
                users.elementwise[user] = users.elementwise.get(node, node)
                if dtype_of(user) in FLOAT8:
                    casts.append(user)
                else:
                    todo.append(user)
            elif (granularity := _match_amax(user, node, users)) is not None:
                users.amaxes[user] = granularity
            else:
                users.others.add(user)
    for cast in casts:
        del users.elementwise[cast]
    return casts


def _keep_needed_amaxes(users: GatherReaders) -> None:
    """Move the amaxes that no cast needs to the other readers."""
    has_row_casts = any(scaled.is_per_row for scaled in users.casts.values())
    needed = _find_needed_amaxes(users)
    unneeded = {
        n for n, granularity in users.amaxes.items() if not (has_row_casts if granularity is Granularity.ROW else n in needed)
    }
    users.others |= unneeded
    users.amaxes = {n: granularity for n, granularity in users.amaxes.items() if n not in unneeded}


def _find_needed_amaxes(users: GatherReaders) -> set[Node]:
    """Return the amaxes that the scales of casts are computed from."""
    elements = users.aliases | users.elementwise.keys()
    chain = [n for cast in users.casts for n in _elementwise_chain(cast, users)]
    todo = [scale for n in chain for scale in n.all_input_nodes if scale not in elements]
    needed, seen = set[Node](), set(todo)
    while todo:
        node = todo.pop()
        if node in users.amaxes:
            needed.add(node)
            continue
        todo += (new := set(node.all_input_nodes) - seen)
        seen |= new
    return needed


def _elementwise_chain(cast: Node, users: GatherReaders) -> list[Node]:
    """Return the nodes that compute `cast` from an alias, last first."""
    chain = [cast]
    while (previous := next((n for n in chain[-1].all_input_nodes if n in users.elementwise), None)) is not None:
        chain.append(previous)
    return chain


def _has_all_elements(node: Node, wait: Node) -> bool:
    """Return whether `node` holds all gathered elements, not a part that a cut made."""
    previous: Node | None = node
    while previous is not None and previous is not wait:
        previous = element_source(previous) if tensor_of(previous) is not None else None
    return previous is wait


def _has_rows_of_shards(alias: Node, wait: Node) -> bool:
    """Return whether the rows of `alias` are whole rows of the shards."""
    step: tuple[Node, Any] | None = (alias, -1)
    while step is not None and step[0] is not wait:
        step = step_to_source(*step)
    return step is not None and step[1] == -1 and step_to_source(wait, -1) is not None


def _is_elementwise_of(user: Node, node: Node) -> bool:
    """Return whether `user` is computed from `node` element by element, with numbers and possible scales."""
    if tensor_of(node) is None or tensor_of(user) is None or not isinstance(user.target, compat.OpOverload):
        return False
    if not _is_elementwise(user.target) or user.target._schema.is_mutable:
        return False
    others = [n for n in user.all_input_nodes if n is not node]
    if not all(tensor_of(n) is not None and _has_scale_shape(n) for n in others):
        return False
    return is_same_shape(shape_of(user), shape_of(node))


def _is_elementwise(target: Any) -> bool:
    """Return whether an op computes each element by itself, and deterministically."""
    return target in CASTS or (torch.Tag.pointwise in target.tags and torch.Tag.nondeterministic_seeded not in target.tags)


def _has_scale_shape(value: Node) -> bool:
    """Return whether the shape of `value` is that of one value per row, per column or per tensor."""
    shape = shape_of(value)
    return not shape or is_same(shape[-1], 1) or all(is_same(s, 1) for s in shape[:-1])


def _match_amax(user: Node, node: Node, users: GatherReaders) -> Granularity | None:
    """Return the granularity at which `user` is the amax of `node`.

    None where it is none, or where `node` has other inputs than the gathered elements.
    """
    if user.target not in _AMAX_OPS or user.kwargs or tensor_of(user) is None or not _is_from_gather_only(node, users):
        return None
    if not shape_of(user):
        return Granularity.TENSOR if dtype_of(user) in _EXACT_IN_FLOAT32 else None
    rank, alias = len(shape_of(node)), users.elementwise.get(node, node)
    if user.target is not aten.amax.default or rank < 2 or len(user.args) != 3 or not user.args[2]:
        return None
    dims = {int(d) % rank for d in user.args[1]}  # type: ignore[union-attr,arg-type]
    if is_same(shape_of(node)[-1], 1) or not _has_rows_of_shards(alias, users.wait):
        return None
    if dims == set(range(rank - 1)):
        return Granularity.COLUMN if dtype_of(user) in _EXACT_IN_FLOAT32 else None
    if dims != {rank - 1}:
        return None
    users.row_order = users.row_order or _row_order(alias)
    return Granularity.ROW if _row_order(alias) is users.row_order else None


def _is_from_gather_only(node: Node, users: GatherReaders) -> bool:
    """Return whether `node` is computed from gathered elements and numbers only."""
    while node not in users.aliases:
        if len(node.all_input_nodes) != 1:
            return False
        node = node.all_input_nodes[0]
    return True


def _row_order(alias: Node) -> Node:
    """Return the first node that has the elements of `alias` in the same order."""
    while (step := element_effect(alias)) is not None and step.kind is Effect.SAME:
        alias = step.source
    return alias


def _match_scaled_cast(cast: Node, users: GatherReaders) -> ScaledCast | None:
    """Return how `cast` is computed, or None where it is not scaled, or by something else than amaxes."""
    node, last_scale, kinds = cast, None, set()
    while node not in users.aliases:
        inputs = node.all_input_nodes
        elements = [n for n in inputs if n in users.elementwise or n in users.aliases]
        if len(elements) != 1:
            return None
        for scale in inputs:
            if scale is elements[0]:
                continue
            granularity = users.granularity(scale)
            if granularity is None or not is_same_shape(shape_of(scale), _scale_shape(granularity, shape_of(elements[0]))):
                return None
            last_scale = last_scale or scale
            kinds.add(granularity)
        node = elements[0]
    if last_scale is None:
        return None
    finest = next(kind for kind in (Granularity.ROW, Granularity.COLUMN, Granularity.TENSOR) if kind in kinds)
    if finest is not Granularity.TENSOR and not _has_rows_of_shards(node, users.wait):
        return None
    if finest is Granularity.ROW and _row_order(node) is not users.row_order:
        return None
    return ScaledCast(node, last_scale, finest)


def _scale_shape(granularity: Granularity, shape: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the shape of scales of elements of `shape`."""
    if granularity is Granularity.TENSOR:
        return ()
    return (*shape[:-1], 1) if granularity is Granularity.ROW else (*[1] * (len(shape) - 1), shape[-1])

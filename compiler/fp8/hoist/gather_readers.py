"""Who reads what a gather brings: casts to float8 that could as well stand before it, and others.

    x -> all_gather -> (views) -> abs -> amax -> scale      maxima, and values computed of them alone
                          |                        |
                          +-> (elementwise) -> * scale -> cast       casts
                          +-> mm, ...                                others: they need the 16 bits themselves

A scale belongs to everything [], to each row [.., 1] or to each column [1, .., c] of the gathered elements (`Granularity`). Shards
are whole rows: the largest of a row is known where the row is, the largest of all or of a column is that of the shards' ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import torch
from torch.fx import Node

from ub_overlap import _torch_compat as compat
from ub_overlap.runtime.fp8.numerics import FLOAT8

from ...graph.aten import CASTS, CUTS, Effect, aten, c10d, dtype_of, element_effect, readers, shape_of, tensor_of
from ...graph.sizes import is_same, is_same_shape
from ..provenance import before, step_back

_MAXIMA = (aten.max.default, aten.amax.default)
_COMPARED = (torch.float32, torch.bfloat16, torch.float16)
"""Types whose numbers float32 has: maxima cross ranks in that."""
_DEPTH = 24
"""Steps from a scale back to its maximum: torchao's are 12."""


class Granularity(Enum):
    """What has a scale of its own."""

    ALL = auto()
    ROWS = auto()
    COLUMNS = auto()


@dataclass(frozen=True, slots=True)
class ScaledCast:
    """How a cast is computed: of the elements of `holder`, last scaled by `scale`. `lines`: ROWS where any scale is one of
    rows, else COLUMNS where any is one of columns."""

    holder: Node
    scale: Node
    lines: Granularity

    @property
    def rows(self) -> bool:
        return self.lines is Granularity.ROWS


@dataclass(slots=True)
class GatherReaders:
    """Readers of one gather. `holders` have its elements as they are, `inside` is computed of them one by one (mapped to the
    holder); `casts` are the float8 ends that could move, `maxima` the largest magnitudes, `others` all other readers."""

    gather: Node
    wait: Node
    holders: set[Node]
    inside: dict[Node, Node] = field(default_factory=dict)
    casts: dict[Node, ScaledCast] = field(default_factory=dict)
    maxima: dict[Node, Granularity] = field(default_factory=dict)
    others: set[Node] = field(default_factory=set)
    order: Node | None = None
    """The first holder of the rows in the order that scales of rows are in."""

    def lines(self, value: Node, depth: int = _DEPTH) -> Granularity | None:
        """What each element of `value` belongs to, if it is computed of maxima of one kind and numbers alone."""
        if value in self.maxima:
            return self.maxima[value]
        if depth == 0 or value.op != "call_function" or tensor_of(value) is None or not _thin(value):
            return None
        step = element_effect(value)
        if step is not None and step.effect is Effect.SAME and self.lines(step.source, depth - 1) is Granularity.ROWS:
            return Granularity.ROWS  # row after row, in another shape
        if not isinstance(value.target, compat.OpOverload) or not _of_elements(value.target):
            return None
        inputs = value.all_input_nodes
        if not all(tensor_of(n) is not None and is_same_shape(shape_of(n), shape_of(value)) for n in inputs):
            return None
        kinds = {self.lines(n, depth - 1) for n in inputs}
        return kinds.pop() if len(kinds) == 1 else None

    def rows(self) -> tuple[set[Node], list[Node]]:
        """(the values of rows, those that somebody reads who is not computed of them alone: they are needed behind the
        gather)."""
        todo = [n for n, lines in self.maxima.items() if lines is Granularity.ROWS]
        seen, wanted = set(todo), []
        while todo:
            node = todo.pop()
            for user in readers(node):
                if self.lines(user) is Granularity.ROWS:
                    if user not in seen:
                        seen.add(user)
                        todo.append(user)
                elif user not in self.casts and user not in self.inside and node not in wanted:
                    wanted.append(node)
        return seen, wanted


def behind(gather: Node) -> GatherReaders | None:
    """The readers of `gather`; None where it is not waited for once."""
    waits = readers(gather)
    if len(waits) != 1 or waits[0].target is not c10d.wait_tensor.default:
        return None
    found = GatherReaders(gather, waits[0], {waits[0]})
    casts: list[Node] = []
    todo = [waits[0]]
    while todo:
        node = todo.pop()
        for user in readers(node):
            if user in found.holders or user in found.inside or user in found.maxima or user in casts:
                continue
            if node in found.holders and _hands_on(user, node, found.holders):
                found.holders.add(user)
                todo.append(user)
            elif node in found.holders and not _whole(node, waits[0]):
                found.others.add(user)
            elif _pointwise(user, node):
                found.inside[user] = found.inside.get(node, node)
                if dtype_of(user) in FLOAT8:
                    casts.append(user)
                else:
                    todo.append(user)
            elif (lines := _maximum(user, node, found)) is not None:
                found.maxima[user] = lines
            else:
                found.others.add(user)
    for cast in casts:
        del found.inside[cast]
    for cast in casts:
        if (scaled := _scaled(cast, found)) is not None:
            found.casts[cast] = scaled
        else:
            found.others.add(cast)
    rows, needed = any(scaled.rows for scaled in found.casts.values()), _needed(found)
    left = {n for n, lines in found.maxima.items() if not (rows if lines is Granularity.ROWS else n in needed)}
    found.others |= left
    found.maxima = {n: lines for n, lines in found.maxima.items() if n not in left}
    return found


def _needed(found: GatherReaders) -> set[Node]:
    """The maxima that the scales of casts are computed of."""
    elements = found.holders | found.inside.keys()
    todo = [n for cast in found.casts for n in _chain(cast, found)]
    todo = [scale for n in todo for scale in n.all_input_nodes if scale not in elements]
    needed, seen = set[Node](), set(todo)
    while todo:
        node = todo.pop()
        if node in found.maxima:
            needed.add(node)
            continue
        todo += (new := set(node.all_input_nodes) - seen)
        seen |= new
    return needed


def _chain(cast: Node, found: GatherReaders) -> list[Node]:
    """What computes a cast of the gathered elements, one after the other."""
    chain = [cast]
    while (element := next((n for n in chain[-1].all_input_nodes if n in found.inside), None)) is not None:
        chain.append(element)
    return chain


def _whole(node: Node, wait: Node) -> bool:
    """Are all gathered elements in `node`, and not a part that a cut made?"""
    here: Node | None = node
    while here is not None and here is not wait:
        here = before(here) if tensor_of(here) is not None else None
    return here is wait


def _whole_rows(holder: Node, wait: Node) -> bool:
    """Are the rows of `holder` those of the shards, one after the other?"""
    here: tuple[Node, Any] | None = (holder, -1)
    while here is not None and here[0] is not wait:
        here = step_back(*here)
    return here is not None and here[1] == -1 and step_back(wait, -1) is not None


def _hands_on(user: Node, node: Node, holders: set[Node]) -> bool:
    """Is `user` the same elements in another form, or a step of cutting and joining them?"""
    if user.target in CUTS or node.target in CUTS or user.target is aten.slice.Tensor:
        return True
    if user.target is aten.cat.default:
        return before(user) in holders
    step = element_effect(user)
    return step is not None and step.source is node and step.effect in (Effect.SAME, Effect.SWAP)


def _pointwise(user: Node, node: Node) -> bool:
    """Is `user` computed of `node` element by element, with numbers and what may be scales beside it?"""
    if tensor_of(node) is None or tensor_of(user) is None or not isinstance(user.target, compat.OpOverload):
        return False
    if not _of_elements(user.target) or user.target._schema.is_mutable:
        return False
    others = [n for n in user.all_input_nodes if n is not node]
    return all(tensor_of(n) is not None and _thin(n) for n in others) and is_same_shape(shape_of(user), shape_of(node))


def _of_elements(target: Any) -> bool:
    """Does an op compute each element by itself, and always the same?"""
    return target in CASTS or (torch.Tag.pointwise in target.tags and torch.Tag.nondeterministic_seeded not in target.tags)


def _thin(value: Node) -> bool:
    """May it be a value a row, a column or one for all, by its shape?"""
    shape = shape_of(value)
    return not shape or is_same(shape[-1], 1) or all(is_same(s, 1) for s in shape[:-1])


def _maximum(user: Node, node: Node, found: GatherReaders) -> Granularity | None:
    """What `user` has the largest elements of `node` of; None where it is something else, or where anything besides the
    gathered elements is in it."""
    if user.target not in _MAXIMA or user.kwargs or tensor_of(user) is None or not _alone(node, found):
        return None
    if not shape_of(user):
        return Granularity.ALL if dtype_of(user) in _COMPARED else None
    rank, holder = len(shape_of(node)), found.inside.get(node, node)
    if user.target is not aten.amax.default or rank < 2 or len(user.args) != 3 or not user.args[2]:
        return None
    dims = {int(d) % rank for d in user.args[1]}  # type: ignore[union-attr,arg-type]
    if is_same(shape_of(node)[-1], 1) or not _whole_rows(holder, found.wait):
        return None
    if dims == set(range(rank - 1)):
        return Granularity.COLUMNS if dtype_of(user) in _COMPARED else None
    if dims != {rank - 1}:
        return None
    found.order = found.order or _first(holder)
    return Granularity.ROWS if _first(holder) is found.order else None


def _alone(node: Node, found: GatherReaders) -> bool:
    """Is `node` computed of the gathered elements and numbers alone?"""
    while node not in found.holders:
        if len(node.all_input_nodes) != 1:
            return False
        node = node.all_input_nodes[0]
    return True


def _first(holder: Node) -> Node:
    """The node that `holder` is a view of, all rows in the same order."""
    while (step := element_effect(holder)) is not None and step.effect is Effect.SAME:
        holder = step.source
    return holder


def _scaled(cast: Node, found: GatherReaders) -> ScaledCast | None:
    """How `cast` is computed; None where it is scaled by something else than maxima, or not at all."""
    node, last, kinds = cast, None, set()
    while node not in found.holders:
        inputs = node.all_input_nodes
        elements = [n for n in inputs if n in found.inside or n in found.holders]
        if len(elements) != 1:
            return None
        for scale in inputs:
            if scale is elements[0]:
                continue
            lines = found.lines(scale)
            if lines is None or not is_same_shape(shape_of(scale), _spread(lines, shape_of(elements[0]))):
                return None
            last = last or scale
            kinds.add(lines)
        node = elements[0]
    if last is None:
        return None
    finest = next(lines for lines in (Granularity.ROWS, Granularity.COLUMNS, Granularity.ALL) if lines in kinds)
    if finest is not Granularity.ALL and not _whole_rows(node, found.wait):
        return None
    return None if finest is Granularity.ROWS and _first(node) is not found.order else ScaledCast(node, last, finest)


def _spread(lines: Granularity, shape: tuple[Any, ...]) -> tuple[Any, ...]:
    """The shape of what is spread over elements of `shape`."""
    if lines is Granularity.ALL:
        return ()
    return (*shape[:-1], 1) if lines is Granularity.ROWS else (*[1] * (len(shape) - 1), shape[-1])

"""A gathered tensor times a constant -> the shard times the constant, gathered.

    x -> all_gather -> wait -> move* -> * c -> matmul, ...          (also: / c, a negation, after a cast to a narrower type)
becomes
    x -> * c -> all_gather -> wait -> move* -> matmul, ...          move: a view, a permute, or cuts that a cat joins again

Each element is multiplied by the same constant in the same type, so results keep their bits. A rank scales its shard only, and
the gather meets its matmuls: hidden states that are divided before the last linear (muP), the gradient of a mean over ranks.
For reductions, the matchers follow the same scalings (match/view_chain.py): their partial sums exist already.

All readers must scale alike: the tensor that another one reads could not be restored from the scaled one. After a widening cast
nothing moves, as the shard would be sent in the wider type.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from ub_overlap import _torch_compat as compat

from ..graph.aten import PADS, Effect, Scaling, c10d, constant_scaling, dtype_of, element_effect, node_arg, readers
from ..graph.emitter import Emitter
from ..graph.joint_graph import copy_region, region_of
from ..graph.matmul import FLOATS
from ..graph.sizes import Size, as_sizes
from ..match.widening_cast import moved_tensors
from .joint_decision import joint_decision, record_decision


@dataclass(frozen=True, slots=True)
class _Scaled:
    """A gather whose result is scaled as a whole, in `dtype`. `moves`, `casts`: between its wait and the equal `scalings`."""

    gather: Node
    wait: Node
    scaling: Scaling
    dtype: torch.dtype
    moves: tuple[Node, ...]
    casts: tuple[Node, ...]
    scalings: tuple[Node, ...]


def may_scale_shards(graph: Graph) -> bool:
    """Return whether a gathered tensor is scaled as a whole."""
    return any(_find_scaled(gather) for gather in _gathers(graph))


def scale_shards(graph: Graph) -> int:
    """Change a joint graph in place. Return the number of gathers of scaled shards."""
    count = 0
    for gather in _gathers(graph):
        scaled = _find_scaled(gather)
        count += scaled is not None
        while scaled is not None:  # one scaling may follow another
            scaled = _find_scaled(_move(graph, scaled))
    return count


def _gathers(graph: Graph) -> list[Node]:
    gathers = graph.find_nodes(op="call_function", target=c10d.all_gather_into_tensor.default)
    return [n for n in gathers if dtype_of(n) in FLOATS]


def _find_scaled(gather: Node) -> _Scaled | None:
    """Return the first scalings of a gathered tensor, None unless all its elements go through equal ones and nowhere else."""
    if [user.target for user in gather.users] != [c10d.wait_tensor.default]:
        return None
    (wait,) = gather.users
    passed, casts, scalings = {wait: None}, list[Node](), list[Node]()
    todo = set(readers(wait))
    while todo:
        node = min(todo)  # the first in graph order: a cat comes after the parts that it joins
        todo.remove(node)
        if region_of(node) != region_of(gather):
            return None
        if constant_scaling(node) is not None:
            scalings.append(node)
            continue
        sources = [] if node.target in PADS else moved_tensors(node)
        if not sources or not passed.keys() >= set(sources):
            return None
        if (effect := element_effect(node)) is not None and effect.kind is Effect.CAST:
            casts.append(node)
        passed[node] = None
        todo |= set(readers(node))
    if len({constant_scaling(node) for node in scalings}) != 1:
        return None
    scaling, dtype, gathered = constant_scaling(scalings[0]), dtype_of(scalings[0]), dtype_of(gather)
    assert scaling is not None
    is_alike = all(
        dtype_of(node) == dtype_of(node_arg(node)) == dtype and _strides(node) == _strides(node_arg(node)) for node in scalings
    )
    narrows = dtype in FLOATS and dtype.itemsize < gathered.itemsize
    is_cast_once = all(dtype_of(node_arg(node)) == gathered and dtype_of(node) == dtype for node in casts)
    if not is_alike or not is_cast_once or (dtype != gathered and not narrows):
        return None
    moves = tuple(node for node in passed if node is not wait and node not in casts)
    return _Scaled(gather, wait, scaling, dtype, moves, tuple(casts), tuple(scalings))


def _strides(node: Node) -> tuple[Size, ...]:
    return as_sizes(node.meta["val"].stride())


def _move(graph: Graph, found: _Scaled) -> Node:
    """Scale the shard in place of what is gathered. Return the new gather."""
    gather, (op, constant), name = found.gather, found.scaling, found.scalings[0].name
    with graph.inserting_before(gather):
        e = Emitter(graph, gather, {})
        shard = e.cast(node_arg(gather), found.dtype)
        scaled = e.call(op, shard, constant)
        result = e.call(gather.target, scaled, *gather.args[1:], **gather.kwargs)
        wait = e.call(found.wait.target, result)
    copy_region(gather, ([] if shard is node_arg(gather) else [shard]) + [scaled, result])
    copy_region(found.wait, [wait])
    decided = joint_decision(gather)
    names = f"{decided.change_note}, {name}" if decided.change_note else f"of the shard before it is gathered: {name}"
    record_decision(result, merged_count=decided.merged_count, saved_bytes=decided.saved_bytes, change_note=names)
    found.wait.replace_all_uses_with(wait)
    for node in (*found.scalings, *found.casts):
        node.replace_all_uses_with(node_arg(node))
        graph.erase_node(node)
    for node in found.moves if found.casts else ():
        node.meta["val"] = compat.tree_map_only(torch.Tensor, lambda value: value.to(found.dtype), node.meta["val"])
    graph.erase_node(found.wait)
    graph.erase_node(gather)
    return result

"""Casts that stand behind a gather move before it: graphs that are float8 already, with gathers that are not.

    x bf16 -> all_gather -> abs -> max -> scale           x -> abs -> max -> all_reduce(max) -> scale
                  |                        |       =>     |                                       |
                  +-> (view) -> * scale -> cast           +-> * scale -> cast -> all_gather -> (view)

    x bf16 -> all_gather -> abs -> amax(rows) -> scale    x -> abs -> amax(rows) -> scale -> all_gather -> (view)
                  |                               |  =>   |                           |
                  +-> (view) -> * scale -> cast           +-> * scale -> cast ------- + ---> all_gather -> (view)

What is computed element by element, or of whole rows, commutes with a gather; the largest of all magnitudes, or of a
column's, is the largest of the shards' ones: every number stays. A NaN alone may not: collectives may drop it from a maximum,
and then only its own element is one. It needs scales that are computed from those maxima alone: others need not be the same on
all ranks.

What only backward reads of a gather of the forward, backward gathers: float8 by columns; and where it reads the 16 bits (a
weight gradient in high precision), those again, beside the products that read them: twice.py weighs it. Where others need them,
the gather stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, Node

from ub_overlap import _torch_compat as compat
from ub_overlap.runtime.fp8.numerics import FLOAT8

from ...cost.policy import Policy
from ...cost.site_sizes import Hints, hints_of
from ...graph.aten import aten, c10d, dtype_of, node_arg, shape_of, tensor_of
from ...graph.emitter import Emitter, find_size_source
from ...graph.erase import erase_unread
from ...graph.joint_graph import LAST_REGION, mark_recomputed, needs_tangents
from ...graph.sizes import Size
from ...joint.joint_decision import record_decision
from ...plan.reasons import Reason
from ..operand_layout import contiguous_scales
from ..provenance import Axis
from ..quantized_values import Quantise, QuantizedValue, QuantizedValues
from ..recipe import NARROW
from .gather_readers import GatherReaders, Granularity, behind
from .rebuild_on_shard import ShardRebuilder
from .regather_cost import products_of, why_not_twice


@dataclass(frozen=True, slots=True)
class HoistConfig:
    """`policy`: a gather below its threshold stays, as the collectives of scales would take longer than what is saved; its
    profile tells whether gathering twice is faster. `transport`: (device type, group, ranks) -> why nothing can be overlapped
    there, or None."""

    policy: Policy
    transport: Callable[[str, str, int], str | None]
    uneven: bool = False
    """Do ranks hold different sizes of an input? What a rank sees of its own must not decide then."""


def cast_before_gathers(graph: Graph, early: HoistConfig) -> int:
    """Rewrites in place; returns of how many gathers."""
    if not graph.find_nodes(op="call_function", target=aten._scaled_mm.default):
        return 0
    tangents = needs_tangents(graph)
    inputs = [n for n in graph.find_nodes(op="placeholder") if n not in tangents]
    hints = hints_of(graph)
    count = 0
    for gather in graph.find_nodes(op="call_function", target=c10d.all_gather_into_tensor.default):
        if dtype_of(gather) not in NARROW or not isinstance(gather.args[2], str):
            continue
        found = behind(gather)
        if found is None:
            continue
        if not found.casts:
            _tell_foreign(found)
            continue
        if (stays := _why_not(found, tangents, inputs, early, hints)) is not None:
            record_decision(gather, why_unmatched=stays)
            continue
        _move(graph, found, inputs, tangents)
        if found.others:
            mark_recomputed((n for n in (gather, *found.holders, *found.inside) if n.users), LAST_REGION)
        count += 1
    if count:
        compat.stable_topological_sort(graph)
    return count


Stays = tuple[Reason, str]


def _why_not(
    found: GatherReaders, tangents: set[Node], inputs: Sequence[Node], early: HoistConfig, hints: Hints
) -> Stays | None:
    """Why casts stay behind their gather."""
    gather, cast = found.gather, min(found.casts)
    policy = early.policy
    sent = policy.bytes_sent_in(gather, dtype_of(gather).itemsize, hints)
    if policy.is_below_threshold(sent):
        return Reason.BELOW_THRESHOLD, f"{cast.name} stays behind it: a rank sends {sent} bytes, below {policy.threshold}"
    rebuilt = ShardRebuilder(found, node_arg(gather), ())
    if any(s.rows for s in found.casts.values()):
        of_rows = {rebuilt.key(c) for c, s in found.casts.items() if s.rows}
        scales = {rebuilt.key(n) for n in found.rows()[1]}
        if len(of_rows) != 1 or len(scales) != 1:
            told = f"{cast.name} stays behind it: {len(of_rows)} casts of its rows, read with {len(scales)} scales of them"
            return Reason.CAST_IN_BETWEEN, told
    for size in _written(found):
        if find_size_source(inputs, size) is None:
            return Reason.DYNAMIC_SHAPE, f"{cast.name} stays behind it: size {size} cannot be computed from the graph's inputs"
    return _why_not_twice(found, tangents, early, hints) if found.others else None


def _why_not_twice(found: GatherReaders, tangents: set[Node], early: HoistConfig, hints: Hints) -> Stays | None:
    """Why a gather that others read in 16 bits is not made twice."""
    gather, policy = found.gather, early.policy
    sent = policy.bytes_sent_in(gather, 1, hints)
    forward = [n for n in found.others if n not in tangents or n.op == "output"]
    other = min(forward or found.others)
    if forward or gather in tangents:
        return Reason.CAST_IN_BETWEEN, f"{min(found.casts).name} stays behind it: {other.name} needs the 16 bits"
    device, group, ranks = gather.meta["val"].device.type, str(gather.args[2]), int(gather.args[1])  # type: ignore[call-overload]
    marked = [n for n in (gather, *found.holders, *found.inside) if "recompute" in n.meta]
    if early.uneven:
        reason, why = Reason.CAST_IN_BETWEEN, "ranks hold different sizes of an input of the graph, and must decide alike"
    elif not all(compat.is_computed_again(n.meta["recompute"]) for n in marked):
        reason, why = Reason.CAST_IN_BETWEEN, "a checkpoint policy of the program's keeps it"
    elif not products_of(found):
        reason, why = Reason.NO_MATMUL, "no product could run beside the float8 rows"
    elif policy.is_below_threshold(sent):
        reason, why = Reason.BELOW_THRESHOLD, f"in float8 a rank sends {sent} bytes, below {policy.threshold}"
    elif told := early.transport(device, group, ranks):
        reason, why = Reason.NO_TRANSPORT, told
    elif not policy.is_forced:
        reason, why = Reason.NO_GAIN, why_not_twice(found, policy.profile(ranks, device), hints)
    else:
        return None
    return (reason, f"not gathered twice for {other.name}, which needs the 16 bits: {why}") if why else None


def _written(found: GatherReaders) -> Iterator[Size]:
    """The sizes that moving may have to say: those of shapes with several dynamic ones (a reshape finds out one by itself), and
    of pieces that are joined again."""
    for node in (*found.holders, *found.maxima, *found.rows()[1]):
        dynamic = [s for s in shape_of(node) if not isinstance(s, int)] if tensor_of(node) is not None else []
        if len(dynamic) > 1 or any(user.target is aten.cat.default for user in node.users):
            yield from dynamic


def _move(graph: Graph, found: GatherReaders, inputs: Sequence[Node], tangents: set[Node]) -> None:
    gather, shard = found.gather, node_arg(found.gather)
    group = str(gather.args[2])
    rebuilt = ShardRebuilder(found, shard, (group,))
    values, wanted = found.rows()
    twins: dict[Any, QuantizedValues] = {}
    dead = {gather, *found.holders, *found.inside, *found.casts, *found.maxima, *values}

    def quantise(cast: Node, scale: Node) -> Quantise:
        def run(e: Emitter, shard: Node, axis: Axis, groups: tuple[str, ...]) -> QuantizedValue:
            return QuantizedValue(rebuilt.on(e, cast), rebuilt.on(e, scale))

        return run

    brought: Node | None = None
    for cast in sorted(found.casts):
        scaled = found.casts[cast]
        key = rebuilt.key(cast)
        if key not in twins:
            scale = wanted[0] if scaled.rows else scaled.scale
            twins[key] = QuantizedValues(graph, {gather}, quantise(cast, scale), inputs, ends=(shard,))
            twins[key].reader = gather
        twin = twins[key].of(scaled.holder, -1 if scaled.rows else None)
        brought = twin.scale if scaled.rows else brought
        if scaled.lines is Granularity.COLUMNS and (later := _for_backward(cast, tangents)) is not None:
            mark_recomputed(later | _between(twins[key].of(shard, None, (group,)).q, twin.q), LAST_REGION)
        cast.replace_all_uses_with(twin.q)
        dead |= twins[key].replaced
    with graph.inserting_before(gather):
        e = Emitter(graph, gather, {}, inputs=inputs)
        for maximum in sorted(n for n, lines in found.maxima.items() if lines is not Granularity.ROWS):
            maximum.replace_all_uses_with(e.reshape(rebuilt.on(e, maximum), shape_of(maximum)))
        for value in wanted if brought is not None else ():
            value.replace_all_uses_with(contiguous_scales(e, brought, shape_of(value)))  # type: ignore[arg-type]
    erase_unread(graph, dead)


def _tell_foreign(found: GatherReaders) -> None:
    """Says of a gather with casts behind it, none of which could move, what hinders them."""
    for node in sorted(n for n in found.others if tensor_of(n) is not None and dtype_of(n) in FLOAT8):
        told = f"{node.name} stays behind it: scaled by something else than the largest of what it casts"
        record_decision(found.gather, why_unmatched=(Reason.CAST_IN_BETWEEN, told))


def _for_backward(cast: Node, tangents: set[Node]) -> set[Node] | None:
    """What the forward half computes of `cast`; None where it is not for backward alone, or all is in backward."""
    if cast in tangents:
        return None
    found: set[Node] = set()
    todo = [cast]
    while todo:
        for user in todo.pop().users:
            if user.op == "output":
                return None
            if user not in tangents and user not in found:
                found.add(user)
                todo.append(user)
    return found


def _between(first: Node, last: Node) -> set[Node]:
    """What hands the elements of `first` on to `last`."""
    found: set[Node] = set()
    todo = [last]
    while todo:
        node = todo.pop()
        if node is not first and node not in found and node.op == "call_function" and node.target is not aten.sym_size.int:
            found.add(node)
            todo += node.all_input_nodes
    return found

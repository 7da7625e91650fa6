"""Rewrite a collective as two ops, start and finish, and if it is zero-copy a third, release. An all_to_all has ops of its own.

A bucket is one such pair for several collectives (windows/buckets.py), of ops for several tensors where it has several parts. A
part of one collective is what that sends. Of others, legend: R ranks; n elements of one input, N of the part.

    all_gather       inputs [s, ..] -> [1, n] -> cat -> [1, N] -> [R, N] -> columns [R, n] -> [R * s, ..]
    reduce_scatter   inputs [R * s, ..] -> [R, n] -> cat -> [R, N] -> [1, N] -> columns [1, n] -> [s, ..]
    all_reduce       inputs [s, ..] -> [1, n] -> cat -> [1, N] -> [1, N] -> columns [1, n] -> [s, ..]

The columns are parts of a packed result (part_strides.py): they are copied where a reader needs the strides that were traced,
and where the graph may not return views of one tensor.

A hierarchical collective is two such pairs. Legend: H hosts of L ranks each; s rows of a shard.

    all_gather       [s] -> across hosts -> [H * s] -> within -> [L * H * s] -> reorder -> [H * L * s]
    reduce_scatter   [H * L * s] -> reorder -> [L * H * s] -> within -> [H * s] -> across hosts -> [s]

The layout of the graph gives the ops their places (windows/layout.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.fx import Node

from ..graph.aten import aten, dtype_of, shape_of
from ..graph.emitter import Emitter
from ..graph.sizes import Size
from ..match.all_to_all import is_permute, split_args
from ..match.bucket_parts import bucket_parts
from ..match.collectives import Collective, Op, byte_dtype
from ..match.site import FIRST_HALF, Split
from ..plan.strategy import DispatchTable, Mode, Strategy
from .narrow_input import emit_narrow
from .packed_operands import PackedOperands
from .part_strides import ALIGNMENT


def rewrite_split(
    e: Emitter, m: Split, strategy: Strategy | DispatchTable, site: str, packed: PackedOperands
) -> dict[Node, Node]:
    """Emit the ops. Return the replacement of each node. Adds the slices of a bucket's result to `packed`."""
    c = m.collective
    assert c.wait is not None and c.op is not None and isinstance(strategy, Strategy)
    if c.op is Op.ALL_TO_ALL:
        return _rewrite_all_to_all(e, m, site)
    schedule = str(Strategy(Mode.BULK, strategy.chunks))  # its steps are those of bulk
    if m.bucket:
        return _rewrite_bucket(e, m, schedule, site, packed)
    tensor, out_dtype = _emit_sent(e, c)
    if m.halves:
        value = _emit_halves(e, m, tensor, schedule, site)
    else:
        (value,) = _emit_transfer(e, m, [_Part(tensor, out_dtype, [c], [])], schedule, site)
    value = _emit_scalings(e, c, value if c.widening else e.bitcast(value, dtype_of(c.node)))
    return {c.wait: value, c.node: value}


def _emit_sent(e: Emitter, c: Collective) -> tuple[Node, torch.dtype]:
    """Emit the tensor that a collective sends. Return it and the type of the result."""
    tensor = emit_narrow(e, c.input, c.widening) if c.widening else e.bitcast(c.input, byte_dtype(c))
    return tensor, dtype_of(c.node) if c.widening else dtype_of(tensor)


def _emit_scalings(e: Emitter, c: Collective, value: Node) -> Node:
    """Emit the scalings in front of a reduction, which follow its result where a narrower type is sent."""
    for target, constant in c.widening.scalings if c.widening else ():
        value = e.call(target, value, constant)
    return value


@dataclass(frozen=True, slots=True)
class _Part:
    """One tensor of a bucket. `members`: the collectives whose data it has, in this order; `widths`: of their columns, if there
    are several."""

    tensor: Node
    out_dtype: torch.dtype
    members: list[Collective]
    widths: list[int]


def _rewrite_bucket(e: Emitter, m: Split, schedule: str, site: str, packed: PackedOperands) -> dict[Node, Node]:
    collectives = (m.collective, *m.bucket)
    sent = [_emit_sent(e, c) for c in collectives]
    parts = [_emit_part(e, [(collectives[i], *sent[i]) for i in part]) for part in bucket_parts(collectives)]
    replaced: dict[Node, Node] = {}
    for part, value in zip(parts, _emit_transfer(e, m, parts, schedule, site), strict=True):
        tensors = packed.cut(e, value, part.widths, 1) if part.widths else [value]
        for c, tensor in zip(part.members, tensors, strict=True):
            assert c.wait is not None
            shaped = e.reshape(tensor, shape_of(c.node))
            result = _emit_scalings(e, c, shaped if c.widening else e.bitcast(shaped, dtype_of(c.node)))
            replaced |= {c.wait: result, c.node: result}
    return replaced


def _emit_part(e: Emitter, sent: list[tuple[Collective, Node, torch.dtype]]) -> _Part:
    """Emit the tensor of a part: what its collective sends, or the data of several side by side."""
    c, tensor, out_dtype = sent[0]
    if len(sent) == 1:
        return _Part(tensor, out_dtype, [c], [])
    rows = c.ranks if c.op is Op.REDUCE_SCATTER else 1
    flat = [(one, e.reshape(tensor, (rows, math.prod(shape_of(tensor)) // rows))) for one, tensor, _ in sent]
    flat.sort(key=lambda pair: shape_of(pair[1])[1] * out_dtype.itemsize % ALIGNMENT != 0)  # the others are aligned then
    columns = [column for _, column in flat]
    joined = e.call(aten.cat.default, columns, 1)
    return _Part(joined, out_dtype, [one for one, _ in flat], [shape_of(column)[1] for column in columns])


def _emit_transfer(e: Emitter, m: Split, parts: list[_Part], schedule: str, site: str) -> list[Node]:
    """Emit start and finish, and release if it is zero-copy. Return the result of each part."""
    c, ops = m.collective, torch.ops.ub_overlap
    assert c.op is not None
    last = (m.slot, schedule, c.group, site)
    if len(parts) == 1:
        value = _emit_pair(e, c, parts[0].tensor, parts[0].out_dtype, m.slot, m.zero_copy, schedule, c.group, site)
        if m.zero_copy:
            e.call(ops.release_collective.default, value, *last)
        return [value]
    inputs, out_dtypes = [part.tensor for part in parts], [part.out_dtype for part in parts]
    arguments = (inputs, c.op.value, c.reduce_op, out_dtypes, m.slot, m.zero_copy, schedule, c.group, site)
    token = e.call(ops.start_coalesced.default, *arguments)
    results = e.call(ops.finish_coalesced.default, token, *arguments)
    values = [e.item(results, i) for i in range(len(parts))]
    if m.zero_copy:
        e.call(ops.release_coalesced.default, values, *last)
    return values


def _emit_pair(
    e: Emitter,
    c: Collective,
    tensor: Node,
    out_dtype: torch.dtype,
    slot: int,
    zero_copy: bool,
    schedule: str,
    group: str | None,
    site: str,
) -> Node:
    assert c.op is not None
    arguments = (tensor, c.op.value, c.reduce_op, out_dtype, slot, zero_copy, schedule, group, site)
    token = e.call(torch.ops.ub_overlap.start_collective.default, *arguments)
    return e.call(torch.ops.ub_overlap.finish_collective.default, token, *arguments)


def _emit_halves(e: Emitter, m: Split, tensor: Node, schedule: str, site: str) -> Node:
    """Emit both halves. The first one's nodes are marked as such, since each half has a place of its own."""
    c, (first, second) = m.collective, m.halves
    gathers = c.op is Op.ALL_GATHER
    rows = shape_of(c.input if gathers else c.node)[0]
    marked = e.marked(site + FIRST_HALF)
    if not gathers:
        tensor = _reorder(marked, tensor, second.ranks, first.ranks, rows)
    for emitter, half, name in ((marked, first, site + FIRST_HALF), (e, second, site)):
        tensor = _emit_pair(emitter, c, tensor, dtype_of(tensor), half.slot, False, schedule, half.group, name)
    return _reorder(e, tensor, second.ranks, first.ranks, rows) if gathers else tensor


def _reorder(e: Emitter, tensor: Node, outer: int, inner: int, rows: Size) -> Node:
    """Emit [outer * inner * rows, ..] as [inner * outer * rows, ..]."""
    whole = shape_of(tensor)
    blocks = (outer, inner, rows, *whole[1:])
    swapped = e.permute(e.reshape(tensor, blocks), (1, 0, *range(2, len(blocks))))
    return e.reshape(swapped, whole)


def _rewrite_all_to_all(e: Emitter, m: Split, site: str) -> dict[Node, Node]:
    c = m.collective
    assert c.wait is not None
    arguments = (*split_args(c), m.slot, is_permute(c), Mode.BULK.value, c.group, site)
    token = e.call(torch.ops.ub_overlap.start_all_to_all.default, c.input, *arguments)
    finish = torch.ops.ub_overlap.finish_all_to_all.default
    value = e.call(finish, token, c.input, *arguments, value_is=c.node.meta["val"])  # sizes that the graph knows
    return {c.wait: value, c.node: value}

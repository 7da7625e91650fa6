"""Rewrite a collective as two ops, start and finish, and if it is zero-copy a third, release. An all_to_all has ops of its own.

A bucket is one such pair for several collectives (windows/buckets.py). Legend: R ranks; n elements of one input, N of all.

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

import torch
from torch.fx import Node

from ..graph.aten import aten, dtype_of, shape_of
from ..graph.emitter import Emitter
from ..graph.sizes import Size
from ..match.all_to_all import is_permute, split_args
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
        value = _emit_pair(e, c, tensor, out_dtype, m.slot, m.zero_copy, schedule, c.group, site)
    if m.zero_copy:
        e.call(torch.ops.ub_overlap.release_collective.default, value, m.slot, schedule, c.group, site)
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


def _rewrite_bucket(e: Emitter, m: Split, schedule: str, site: str, packed: PackedOperands) -> dict[Node, Node]:
    c = m.collective
    rows = c.ranks if c.op is Op.REDUCE_SCATTER else 1
    sent = [(one, *_emit_sent(e, one)) for one in (c, *m.bucket)]
    flat = [(one, e.reshape(tensor, (rows, math.prod(shape_of(tensor)) // rows))) for one, tensor, _ in sent]
    out_dtype = sent[0][2]
    flat.sort(key=lambda pair: shape_of(pair[1])[1] * out_dtype.itemsize % ALIGNMENT != 0)  # the others are aligned then
    joined = e.call(aten.cat.default, [part for _, part in flat], 1)
    value = _emit_pair(e, c, joined, out_dtype, m.slot, False, schedule, c.group, site)
    replaced: dict[Node, Node] = {}
    begin = 0
    for one, part in flat:
        assert one.wait is not None
        end = begin + shape_of(part)[1]
        columns = e.call(aten.slice.Tensor, value, 1, begin, end)
        packed.parts.append(columns)
        result = _emit_scalings(e, one, e.reshape(columns, shape_of(one.node)))
        replaced |= {one.wait: result, one.node: result}
        begin = end
    return replaced


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

"""Rewrite a collective as two ops, start and finish, and if it is zero-copy a third, release. An all_to_all has ops of its own.

The layout of the graph gives them their places (windows/layout.py).
"""

from __future__ import annotations

import torch
from torch.fx import Node

from ..graph.aten import dtype_of
from ..graph.emitter import Emitter
from ..match.all_to_all import split_args
from ..match.collectives import Op, byte_dtype
from ..match.site import Split
from ..plan.strategy import DispatchTable, Mode, Strategy
from .narrow_input import emit_narrow


def rewrite_split(e: Emitter, m: Split, strategy: Strategy | DispatchTable, site: str) -> dict[Node, Node]:
    """Emit the ops. Return the replacement of each node."""
    c = m.collective
    assert c.wait is not None and c.op is not None and isinstance(strategy, Strategy)
    if c.op is Op.ALL_TO_ALL:
        return _rewrite_all_to_all(e, m, site)
    tensor = emit_narrow(e, c.input, c.widening) if c.widening else e.bitcast(c.input, byte_dtype(c))
    out_dtype = dtype_of(c.node) if c.widening else dtype_of(tensor)
    schedule = str(Strategy(Mode.BULK, strategy.chunks))  # its steps are those of bulk
    arguments = (tensor, c.op.value, c.reduce_op, out_dtype, m.slot, m.zero_copy, schedule, c.group, site)
    token = e.call(torch.ops.ub_overlap.start_collective.default, *arguments)
    value = e.call(torch.ops.ub_overlap.finish_collective.default, token, *arguments)
    if m.zero_copy:
        e.call(torch.ops.ub_overlap.release_collective.default, value, m.slot, schedule, c.group, site)
    value = value if c.widening else e.bitcast(value, dtype_of(c.node))
    for target, constant in c.widening.scalings if c.widening else ():
        value = e.call(target, value, constant)
    return {c.wait: value, c.node: value}


def _rewrite_all_to_all(e: Emitter, m: Split, site: str) -> dict[Node, Node]:
    c = m.collective
    assert c.wait is not None
    arguments = (*split_args(c), m.slot, Mode.BULK.value, c.group, site)
    token = e.call(torch.ops.ub_overlap.start_all_to_all.default, c.input, *arguments)
    finish = torch.ops.ub_overlap.finish_all_to_all.default
    value = e.call(finish, token, c.input, *arguments, value_is=c.node.meta["val"])  # sizes that the graph knows
    return {c.wait: value, c.node: value}

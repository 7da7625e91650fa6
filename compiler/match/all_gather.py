"""all_gather -> matmuls.

    all_gather_into_tensor -> wait -> [view | permute | cast]* -> mm / addmm / bmm            gather dim 0, weights, gradients
    ... wait -> split -> getitem* -> cat(dim d) -> ...                                        gather dim d, forward
    ... wait -> slice* -> cat(dim d) -> ...                                                   gather dim d, backward
    ... wait -> view [1, S, K] -> view [S, K] -> ...                                          gather dim 1 of a batch of 1

A constant that scales the gathered tensor was moved to the shard (joint/scale_shards.py).

The walk follows the gathered elements forward. Every matmul that reads them, as either operand and in either orientation,
is a consumer. The op keeps the gathered tensor for all other readers.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from ub_overlap.runtime.fp8.numerics import FLOAT8

from ..graph.aten import dtype_of, readers
from ..graph.matmul import FLOATS, comes_from_matmul
from ..joint.joint_decision import joint_decision
from ..plan.reasons import Reason
from .collectives import Collective
from .consumer_groups import ConsumerGroups
from .gather_walk import GatherWalk
from .row_scales import gathered_scales
from .site import Gather, Miss


def match_all_gather(c: Collective, position: dict[Node, int]) -> Gather | Miss:
    """Return the all_gather with its consumers in graph order (`position`), or the reason why there are none.

    One op serves the largest group of consumers that read the gathered matrix in the same layout.
    """
    if dtype_of(c.node) not in (*FLOATS, *FLOAT8, torch.uint8):
        supported = "float32, bfloat16, float16 and float8"
        return Miss(Reason.DTYPE_UNSUPPORTED, f"gathers {dtype_of(c.node)}; {supported} are overlapped")
    walk = GatherWalk(c)
    groups = ConsumerGroups(walk)
    if not groups.uses:
        return walk.blocked[0] if walk.blocked else _explain_no_matmul(walk)
    layout, uses = groups.take_largest()
    wire = _wire_dtype(walk, layout.dtype)
    if isinstance(wire, Miss):
        return wire
    return Gather(
        collective=c,
        blocks=uses[0].alias.blocks,
        rows=layout.rows,
        cols=layout.cols,
        shard_dim_is_last=layout.shard_dim_is_last,
        dtype=wire,
        consumers=tuple(sorted((u.consumer for u in uses), key=lambda k: position[k.compute.node])),
        aliases=walk.aliases,
        kept_aliases=tuple(dict.fromkeys(walk.kept)),
        permutes=layout.permutes,
        cuts=tuple(walk.cuts),
        scales=gathered_scales([u.consumer.compute for u in uses]),
    )


def _wire_dtype(walk: GatherWalk, dtype: torch.dtype) -> torch.dtype | Miss:
    """The type that is gathered for matmuls of `dtype`."""
    wire = dtype if dtype in FLOAT8 else dtype_of(walk.collective.node)
    if dtype.itemsize < wire.itemsize:  # the cast moves before the gather: fewer bytes are sent, the values are the same
        if others := {walk.aliases[n].dtype for n in walk.kept} - {dtype}:
            needed = ", ".join(sorted(map(str, others)))
            return Miss(Reason.CAST_IN_BETWEEN, f"multiplied as {dtype}, but others need the gathered tensor as {needed}")
        wire = dtype
    elif dtype.itemsize == wire.itemsize and dtype != wire:
        return Miss(Reason.CAST_IN_BETWEEN, f"gathered as {wire}, multiplied as {dtype}")
    if dtype not in (*FLOATS, *FLOAT8):
        return Miss(Reason.DTYPE_UNSUPPORTED, f"multiplied as {dtype}")
    return wire


def _explain_no_matmul(walk: GatherWalk) -> Miss:
    """Why the gather has no consumer. Say where else to look, or what to do, where the graph shows it."""
    if why := joint_decision(walk.collective.node).why_unmatched:
        return Miss(*why)
    detail = "no matmul reads the gathered tensor"
    inside = {*walk.aliases, *walk.cuts}
    others = [u for n in walk.aliases for u in readers(n) if u.op == "call_function" and u not in inside]
    if others:
        detail += f": {min(others).name} does"
    elif any(u.op == "output" for n in walk.aliases for u in n.users):
        detail += ", which leaves the graph: a matmul of another graph may (after a graph break or DDPOptimizer's split)"
    if comes_from_matmul(walk.collective.input):
        detail += "; it is the result of a matmul, which may stay sharded: loss_parallel reads shards of logits"
    return Miss(Reason.NO_MATMUL, detail)

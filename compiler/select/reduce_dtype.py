"""The option `reduce_dtype`: the type in which a backward graph sends the gradients that it returns.

    None        before a widening cast the narrow type, otherwise as traced       the summands are the traced ones
    as wide     as traced                                                         the same
    narrower    rounded to it, and returned in the traced type                    the summands are rounded: opt-in

Sums are taken in fp32 either way. Other reductions, such as those of activations, are not affected. Nor are reductions across
hosts: c10d, which carries them, sums in the type that it sends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.fx import Graph, Node

from ..graph.aten import dtype_of
from ..graph.matmul import FLOATS
from ..match import Candidate, Miss, Reduction
from ..match.collectives import Collective, Op
from ..match.widening_cast import WideningCast
from ..match.window import WindowFinder
from ..plan.reasons import Reason


def apply_reduce_dtype(graph: Graph, candidates: Sequence[Candidate], dtype: torch.dtype | None) -> None:
    """Set what the candidates that reduce gradients send, for a backward graph. `dtype`: the option; None changes nothing."""
    if dtype is None:
        return
    for candidate in find_gradient_reductions(graph, candidates):
        c = candidate.collective
        if (c.narrow_dtype == dtype and c.widening is not None) or c.hosts > 1:  # c10d sums in what it sends
            continue
        traced = dtype_of(c.input)
        rounded = WideningCast(dtype, (), ()) if dtype.itemsize < traced.itemsize else None
        candidate.collective = c = replace(c, widening=rounded)
        if rounded is not None:
            candidate.fused = Miss(Reason.REDUCE_DTYPE, f"one kernel sends {traced}, and reduce_dtype asks for {dtype}")
        match = candidate.match
        if not isinstance(match, Reduction):
            continue
        sent = dtype_of(match.terms[0].node)
        if sent == c.narrow_dtype:
            candidate.match = replace(match, collective=c)
        else:
            detail = f"the matmul's op sends {sent}, and reduce_dtype asks for {c.narrow_dtype}"
            candidate.match, candidate.miss = None, Miss(Reason.REDUCE_DTYPE, detail)


def find_gradient_reductions(graph: Graph, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the sums of floating-point tensors that reach nothing but the graph's output, also through further sums."""
    finder = WindowFinder(graph)
    found: dict[Node, Candidate] = {}
    for candidate in reversed(candidates):
        c = candidate.collective
        if _is_sum(c) and all(n.op == "output" or n in found for n in finder.find(c).readers):
            found[c.node] = candidate
    return list(found.values())[::-1]


def _is_sum(c: Collective) -> bool:
    is_reduction = c.op in (Op.REDUCE_SCATTER, Op.ALL_REDUCE) and c.reduce_op in ("sum", "avg")
    return is_reduction and c.wait is not None and dtype_of(c.input) in FLOATS

"""graph -> candidates: every collective with its possible sites. Selection is left to compiler/select."""

from __future__ import annotations

from collections.abc import Callable

from torch.fx import Graph, Node

from ..graph.aten import dtype_of
from ..plan.reasons import Reason
from .all_gather import match_all_gather
from .all_reduce import match_all_reduce
from .all_to_all import match_all_to_all
from .amax_reductions import is_amax_reduction
from .collectives import Collective, Op, find_collectives
from .fused import match_fused
from .independence import IndependentMatmuls
from .reduce_scatter import match_reduce_scatter
from .site import Candidate, Gather, Match, Miss

Matcher = Callable[[Collective, dict[Node, int]], Match | Miss]
"""(collective, position of each node in the graph) -> the match, or the reason why there is none."""
MATCHERS: dict[Op, Matcher] = {
    Op.ALL_GATHER: match_all_gather,
    Op.REDUCE_SCATTER: match_reduce_scatter,
    Op.ALL_REDUCE: match_all_reduce,
    Op.ALL_TO_ALL: match_all_to_all,
}
"""The matcher of each kind of collective. Other kinds are reported as unsupported."""


def find_candidates(graph: Graph) -> list[Candidate]:
    """Return every collective of `graph`, in graph order, with its match or miss and its independent matmuls."""
    position = {n: i for i, n in enumerate(graph.nodes)}
    collectives = find_collectives(graph)
    independence = IndependentMatmuls(graph, [c.node for c in collectives], position)
    candidates = [_candidate(c, position, independence) for c in collectives]
    _attach_scale_gathers(candidates)
    return candidates


def _candidate(c: Collective, position: dict[Node, int], independence: IndependentMatmuls) -> Candidate:
    result = match_collective(c, position)
    candidate = Candidate(c, miss=result) if isinstance(result, Miss) else Candidate(c, match=result)
    has_fused_forms = c.op is not None and c.op is not Op.ALL_TO_ALL
    if has_fused_forms and c.wait is not None and not is_amax_reduction(c) and dtype_of(c.node).itemsize > 1:
        matched = {p.node for p in candidate.match.matmuls} if candidate.match else set()
        candidate.fused = match_fused(c)
        candidate.independent_matmuls = tuple(p for p in independence.find(c.node) if p.node not in matched)
    return candidate


def match_collective(c: Collective, position: dict[Node, int]) -> Match | Miss:
    """Return the collective with its matmuls, or why there are none. `position`: of each node in the graph."""
    if c.op is None:
        return Miss(Reason.COLLECTIVE_UNSUPPORTED, f"{c.node.target} is not overlapped")
    if c.wait is None:
        return Miss(Reason.COLLECTIVE_UNSUPPORTED, f"{c.node.name} has {len(c.node.users)} waits")
    if c.group is None:
        return Miss(Reason.GROUP_NOT_STATIC, "the graph computes the group")
    if c.ranks == 1:
        return Miss(Reason.TRIVIAL_GROUP, "the group has one rank")
    if is_amax_reduction(c):
        return Miss(Reason.SCALES, "reduces the amax values that float8 scales are computed from")
    return MATCHERS[c.op](c, position)


def _attach_scale_gathers(candidates: list[Candidate]) -> None:
    """Attach gathers of row scales to the gathers of their rows."""
    by_node = {k.collective.node: k for k in candidates}
    for number, candidate in enumerate(candidates):
        if isinstance(candidate.match, Gather) and candidate.match.scales is not None:
            scales = by_node[candidate.match.scales.collective.node]
            scales.match, scales.independent_matmuls, scales.carrier = None, (), number
            scales.miss = Miss(Reason.SCALES, "holds the scales of gathered rows")

"""graph -> candidates: every collective with what could be done about it. Finds, never decides."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from torch.fx import Graph, Node

from ..graph.aten import dtype_of
from ..graph.matmul import Matmul, as_matmul, is_matmul
from ..plan.reasons import Reason
from .all_gather import match_all_gather
from .collectives import Collective, Op, find_collectives
from .reduction import match_reduction
from .scales import is_amax_reduction
from .site import Candidate, Gather, Miss, Reduction

BESIDE_SEARCH = 64
"""Products looked at per collective: those of a few layers around it. Keeps the pass linear in the depth of the model."""
BESIDE_LIMIT = 16
"""Independent products kept per collective, nearest first: more could not hide more, and their operands would live longer."""


def find_candidates(graph: Graph) -> list[Candidate]:
    """Every collective of `graph`, in graph order, with its match or its miss and the products that are independent of it."""
    position = {n: i for i, n in enumerate(graph.nodes)}
    found = find_collectives(graph)
    beside = _Independence(graph, [c.node for c in found], position)
    out = []
    for c in found:
        result = _match(c, position)
        candidate = Candidate(c)
        if isinstance(result, Miss):
            candidate.miss = result
        else:
            candidate.match = result
        if c.op is not None and c.wait is not None and not is_amax_reduction(c) and dtype_of(c.node).itemsize > 1:
            taken = {p.node for p in candidate.match.matmuls} if candidate.match else set()
            candidate.independent_matmuls = tuple(p for p in beside.of(c.node) if p.node not in taken)
        out.append(candidate)
    _scales_go_along(out)
    return out


def _scales_go_along(candidates: list[Candidate]) -> None:
    """Gathers of row scales belong to the gathers of their rows."""
    by_node = {k.collective.node: k for k in candidates}
    for number, candidate in enumerate(candidates):
        if isinstance(candidate.match, Gather) and candidate.match.scales is not None:
            scales = by_node[candidate.match.scales.collective.node]
            scales.match, scales.independent_matmuls, scales.carrier = None, (), number
            scales.miss = Miss(Reason.SCALES, "holds the scales of gathered rows")


def _match(c: Collective, position: dict[Node, int]) -> Gather | Reduction | Miss:
    if c.op is None:
        return Miss(Reason.COLLECTIVE_UNSUPPORTED, f"{c.node.target} is not overlapped")
    if c.wait is None:
        return Miss(Reason.COLLECTIVE_UNSUPPORTED, f"{c.node.name} is waited for {len(c.node.users)} times")
    if c.group is None:
        return Miss(Reason.GROUP_NOT_STATIC, "the group is computed in the graph")
    if c.ranks == 1:
        return Miss(Reason.TRIVIAL_GROUP, "the group has one rank")
    if is_amax_reduction(c):
        return Miss(Reason.SCALES, "brings the largest magnitudes together that float8 tensors are scaled by")
    if c.op is Op.ALL_GATHER:
        return match_all_gather(c, position)
    return match_reduction(c)


class _Independence:
    """Which products neither need a collective nor feed it: one bit a collective or product, one sweep over the graph."""

    def __init__(self, graph: Graph, marked: list[Node], position: dict[Node, int]) -> None:
        self._position = position
        self._products = {n: p for n in graph.nodes if is_matmul(n) and (p := as_matmul(n)) and p.bias is None and not p.scales}
        self._bit = {n: 1 << i for i, n in enumerate([*marked, *self._products])}
        self._needs: dict[Node, int] = {}
        for n in graph.nodes:
            needs = self._bit.get(n, 0)
            for i in n.all_input_nodes:
                needs |= self._needs[i]
            self._needs[n] = needs
        self._ordered = list(self._products)
        self._at = [position[n] for n in self._ordered]

    def of(self, node: Node) -> list[Matmul]:
        """Products independent of `node`, nearest in graph order first, `BESIDE_LIMIT` at most."""
        mine, needs = self._bit[node], self._needs[node]
        here = bisect_left(self._at, self._position[node])
        out = []
        before = self._ordered[max(0, here - BESIDE_SEARCH) : here][::-1]
        after = self._ordered[here : here + BESIDE_SEARCH]
        for n in merge_nearest(before, after, self._position, self._position[node]):
            if not (self._needs[n] & mine) and not (needs & self._bit[n]):
                out.append(self._products[n])
                if len(out) == BESIDE_LIMIT:
                    break
        return out


def merge_nearest(before: list[Node], after: list[Node], position: dict[Node, int], here: int) -> Iterator[Node]:
    """`before` (backward) and `after` (forward) merged by distance from position `here`."""
    i = j = 0
    while i < len(before) or j < len(after):
        left = here - position[before[i]] if i < len(before) else None
        right = position[after[j]] - here if j < len(after) else None
        if right is None or (left is not None and left <= right):
            yield before[i]
            i += 1
        else:
            yield after[j]
            j += 1

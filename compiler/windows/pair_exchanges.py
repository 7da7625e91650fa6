"""Bring exchanges that are independent of each other together, with what feeds the later one in between.

    dispatch 0, experts 0, combine 0, sum 0, dispatch 1, experts 1, combine 1, sum 1
becomes
    dispatch 0, dispatch 1, experts 0, combine 0, experts 1, combine 1, sum 0, sum 1

A layer computed in two halves (tokens/) is traced one half after the other. Each exchange would then be waited for at once,
although the other half has work to do meanwhile. So the next exchange that is independent of one moves behind it, in front of
what reads the first, with all that it needs: a wait, the experts of its half. Both are then started early, and the window of
each holds compute of the other half. Counts that the host reads for the second one are exchanged and read with those of the
first: behind the first one, the host would wait for a transfer in front of them on the link, and issue nothing meanwhile. Only
what a router computes moves there: the first exchange starts behind it.

A graph whose peak memory would grow too much stays as it is. So do the steps of rings: a rank that attends to no other keys has
steps that are independent of each other, and other ranks do not (ring_slots.py).
"""

from __future__ import annotations

from collections.abc import Iterable

from torch.fx import Graph, Node

from ub_overlap import _torch_compat as compat

from ..cost.assumed_sizes import assume_sizes
from ..cost.policy import Policy
from ..cost.site_sizes import Hints, hints_of
from ..graph.arrange import arrange
from ..graph.aten import c10d, is_elementwise, is_mutable, is_random, tensor_of
from ..graph.compute import is_compute
from ..graph.matmul import as_matmul
from ..match.all_to_all import host_reads, is_permute, match_all_to_all, why_not_split
from ..match.collectives import Collective, is_collective, read_collective
from ..match.site import Split
from ..plan.reasons import Reason
from ..select.peak_memory import PeakMemory

NEXT = 3
"""Exchanges behind one of which the first independent one is taken: those of a layer."""
ROUTER_WIDTH = 1024
"""Columns at most of what a router computes: one for each expert. They are the same on ranks with other numbers of tokens."""


def pair_exchanges(graph: Graph, policy: Policy) -> int:
    """Reorder `graph` in place. Return the number of exchanges that moved. Only where predicted times decide."""
    if not policy.may_split:
        return 0
    nodes = graph.find_nodes(op="call_function", target=c10d.all_to_all_single.default)
    if len(nodes) < 2:
        return 0
    hints = assume_sizes(graph, hints_of(graph))
    exchanges = [c for c in map(read_collective, nodes) if _may_pair(c, policy, hints)]
    if len(exchanges) < 2:
        return 0
    before = list(graph.nodes)
    order = _Sequence(list(before))
    pairs = [(c, other) for c in exchanges if (other := order.bring_next(c, exchanges)) is not None]
    if not pairs:
        return 0
    limit = PeakMemory.of(graph, hints).limit
    arrange(order.items)
    if PeakMemory.of(graph, hints).peak > limit:
        arrange(before)
        return 0
    for c, other in pairs:
        order.read_first(c, other)
    arrange(order.items)
    return len(pairs)


def _may_pair(c: Collective, policy: Policy, hints: Hints) -> bool:
    """Return whether `c` is an exchange of rows that may be split, and that all ranks have alike."""
    if c.wait is None or c.group is None or c.ranks < 2 or why_not_split(c) or is_permute(c):
        return False
    value = tensor_of(c.node)
    if value is None or not policy.is_weighed(value.device.type):
        return False
    if match_all_to_all(c, {}).reason is Reason.DTYPE_UNSUPPORTED:
        return False
    return c.hosts > 1 or not policy.is_below_threshold(policy.bytes_sent(Split(c), hints=hints))


class _Sequence:
    """The order of a graph's nodes while exchanges move."""

    def __init__(self, items: list[Node]) -> None:
        self.items = items
        self.position = {n: i for i, n in enumerate(items)}

    def bring_next(self, c: Collective, exchanges: list[Collective]) -> Collective | None:
        """Move the first exchange that is independent of `c` behind it, unless it is in front of the readers of `c` anyway.

        Return it, None where nothing moves.
        """
        at = self.position[c.node]
        later = sorted((o for o in exchanges if self.position[o.node] > at), key=lambda o: self.position[o.node])
        assert c.wait is not None
        first = min((self.position[u] for u in c.wait.users), default=len(self.items))
        for other in later[:NEXT]:
            there = self.position[other.node]
            needed = self._between([other.node], at)
            if c.node in needed:
                continue
            if first > there or not self._may_move(needed, at, there):
                return None
            self._move(needed, at, there)
            return other
        return None

    def read_first(self, c: Collective, other: Collective) -> None:
        """Move what the host reads for `other` in front of what it reads for `c`, so that it waits once for both.

        Only what a router computes moves. Numbers of rows decide nothing: ranks that have other ones must exchange counts in
        the same order.
        """
        reads = host_reads(c)
        if not reads:
            return
        at = min(self.position[read] for read in reads)
        needed = self._between(host_reads(other), at)
        if not needed or not needed.isdisjoint(reads) or not all(map(_is_of_router, needed)):
            return
        there = max(self.position[n] for n in needed)
        if self._may_move(needed, at, there):
            self._move(needed, at - 1, there)

    def _may_move(self, nodes: set[Node], at: int, there: int) -> bool:
        """Return whether `nodes` may move between two positions."""
        return all(map(_may_move, nodes)) and not any(map(is_mutable, self.items[at:there]))

    def _between(self, nodes: Iterable[Node], at: int) -> set[Node]:
        """Return `nodes` and all that they need, from position `at` on."""
        found, todo = set[Node](), list(nodes)
        while todo:
            n = todo.pop()
            if n not in found and self.position[n] >= at:
                found.add(n)
                todo += n.all_input_nodes
        return found

    def _move(self, nodes: set[Node], at: int, there: int) -> None:
        """Move `nodes`, which lie between two positions, behind the first one."""
        part = self.items[at + 1 : there + 1]
        part = [n for n in part if n in nodes] + [n for n in part if n not in nodes]
        self.items[at + 1 : there + 1] = part
        self.position |= {n: i for i, n in enumerate(part, at + 1)}


def _is_of_router(node: Node) -> bool:
    """Return whether `node` may be part of a router: elementwise, of integers, or narrow, and no large matmul."""
    value = tensor_of(node)
    if (is_compute(node) and as_matmul(node) is None) or isinstance(node.target, compat.HigherOrderOperator):
        return False
    if value is None:  # numbers, and results of sort and topk
        return True
    if is_collective(node):  # counts: bytes may be rows
        return not value.dtype.is_floating_point and value.dtype.itemsize >= 4
    width = value.shape[-1] if value.dim() else 1
    is_narrow = isinstance(width, int) and width <= ROUTER_WIDTH
    return not value.dtype.is_floating_point or is_narrow or is_elementwise(node)


def _may_move(node: Node) -> bool:
    return node.op in ("call_function", "get_attr") and not is_mutable(node) and not is_random(node)

"""Widen the windows of collectives in the middle of a graph: independent nodes move between start and first reader.

    q, k, start k, finish k, v, start v, finish v, attention
becomes
    k, start k, v, start v, q, finish k, finish v, attention

Activations that no matmul takes as shards (keys and values under context parallelism, tokens of experts) are sent right behind
what computes them and read at once, so their windows are empty as traced. Two kinds of nodes can fill such a window:

    delayed   nodes in front of the collective that do not feed it: the q projection, a weight gradient
    advanced  nodes behind its first reader that do not need it: the weight gradients of another projection

As few nodes move as hide the transfer, the nearest first. Collectives, writes, random ops and their order stay. But a reduction
that only the graph's output reads is delayed with the gradient that it reduces, and the gather of a parameter is advanced with
what reads it: experts next to sharded weights. Where peak memory would grow too much, the windows with the least to hide there
are left alone.

The steps of a ring have attention in their windows, or on other ranks nothing, and all ranks must keep one order. So only the
last step is widened, whose result no step and no attention reads.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from torch.fx import Graph, Node

from ub_overlap import _torch_compat as compat

from ..cost.assumed_sizes import assume_sizes
from ..cost.host_time import host_us
from ..cost.policy import Policy
from ..cost.site_sizes import Hints, hints_of, shape_of_site
from ..cost.split_time import split_times
from ..graph.arrange import arrange
from ..graph.aten import c10d, is_mutable, is_random, tensor_of
from ..graph.attention import as_attention
from ..graph.compute import is_compute
from ..match.all_to_all import host_reads, why_not_split
from ..match.candidates import match_collective
from ..match.collectives import Collective, Op, find_collectives, is_collective
from ..match.site import Miss, Split
from ..match.window import Window, WindowFinder
from ..select.peak_memory import PeakMemory
from .node_times import NodeTimes, next_to_collectives
from .placement import SLACK, SLACK_US

REACH = 400
"""Nodes examined on each side of a window: those of a few layers. Keeps the pass linear in the depth of the model."""
TRIES = 4
"""Orders that are tried at most, each with fewer windows, until one is within the memory limit."""


@dataclass(frozen=True, slots=True)
class _Narrow:
    """A window that may be widened. `transfer_us`: what is to be hidden in it."""

    window: Window
    transfer_us: float


def widen_windows(graph: Graph, policy: Policy, parameters: Collection[Node] | None) -> int:
    """Reorder `graph` in place. Return the number of nodes that moved.

    `parameters`: as in `Window.is_at_the_edge`. Only where predicted times decide, and split sites may be chosen.
    """
    if not policy.may_split:
        return 0
    hints = assume_sizes(graph, hints_of(graph))
    narrow, gathers, reductions, differs = _find_narrow(graph, policy, parameters, hints)
    if not narrow:
        return 0
    c = narrow[0].window.collective
    position = {n: i for i, n in enumerate(graph.nodes)}
    untimed = next_to_collectives(graph, [(other, match_collective(other, position)) for other in find_collectives(graph)])
    times = NodeTimes.of(graph, policy.profile(c.ranks, _device(c)), hints, untimed, only_compute=differs)
    before, limit, fixed = list(graph.nodes), PeakMemory.of(graph, hints).limit, set[Node]()
    for _ in range(TRIES):
        order = _Order(list(before), times.us, gathers, reductions, fixed)
        for n in narrow:
            order.widen(n)
        if not order.moved_for:
            break
        arrange(order.items)
        memory = PeakMemory.of(graph, hints)
        if memory.peak <= limit:
            return len(order.moved)
        too_large = _find_too_large(order, before, memory.live, limit)
        if not too_large:
            break
        fixed |= too_large
    arrange(before)
    return 0


def _find_too_large(order: _Order, before: Sequence[Node], live: Sequence[int], limit: int) -> set[Node]:
    """Return the collectives whose windows are to stay as they are: at each peak beyond the limit, that with the least to hide.

    `before`: the nodes in their first order. `live`: bytes at each position of the order.
    """
    old, new = ({n: i for i, n in enumerate(items)} for items in (before, order.items))
    moved = order.moved
    resting = [i for i, n in enumerate(order.items) if n not in moved]  # in both orders one behind the other
    old_places = [old[order.items[i]] for i in resting]

    def span(node: Node) -> tuple[int, int]:
        """Return the positions, in the new order, between which `node` has moved."""
        k = bisect_left(old_places, old[node])
        was = resting[k] if k < len(resting) else len(order.items) - 1
        return min(was, new[node]), max(was, new[node])

    spans = {}
    for c, nodes in order.moved_for.items():
        firsts, lasts = zip(*map(span, nodes), strict=True)
        spans[c] = min(firsts), max(lasts)
    too_large = set[Node]()
    for peak in sorted((i for i, b in enumerate(live) if b > limit), key=lambda i: -live[i]):
        here = {c for c, (first, last) in spans.items() if first <= peak <= last}
        if here and not here & too_large:
            too_large.add(min(here, key=lambda c: (order.total_us(order.moved_for[c]), new[c])))
    return too_large


def _find_narrow(
    graph: Graph, policy: Policy, parameters: Collection[Node] | None, hints: Hints
) -> tuple[list[_Narrow], set[Node], set[Node], bool]:
    """Return the collectives in the middle of the graph that only splitting may hide, in graph order; gathers of parameters;
    reductions that only the output reads; and whether the graph has a ring, so that other ranks may have another graph. Gathers
    and reductions come with their waits."""
    finder: WindowFinder | None = None
    position: dict[Node, int] = {}
    found = []
    gathers, reductions, differs = set[Node](), set[Node](), False
    for c in find_collectives(graph):
        if c.op is None or c.wait is None or c.group is None or c.ranks < 2 or not policy.is_weighed(_device(c)):
            continue
        if c.op is Op.ALL_TO_ALL and why_not_split(c):
            continue
        site = Split(c)
        if c.hosts == 1 and policy.is_below_threshold(policy.bytes_sent(site, hints=hints)):
            continue
        finder = finder or WindowFinder(graph)
        window = finder.find(c)
        shape = shape_of_site(site, hints)
        if shape is None:
            continue
        if window.is_at_the_edge(parameters):
            (gathers if c.op is Op.ALL_GATHER else reductions).update((c.node, c.wait))
            continue
        if window.may_differ_by_rank:
            differs = True
            if not _ends_ring(window):
                continue
        position = position or {n: i for i, n in enumerate(graph.nodes)}
        times = split_times(shape, 0, policy.profile(c.ranks, _device(c)))
        may_gain = times.shortest_us < times.plain_us or window.may_differ_by_rank  # rings are split whatever it costs
        if may_gain and isinstance(match_collective(c, position), Miss):
            found.append(_Narrow(window, times.transfer_us))
    if differs:  # so may what moves: nothing that communicates
        return found, set(), set(), True
    return found, gathers, reductions, False


def _ends_ring(window: Window) -> bool:
    """Return whether a matmul reads what a step of a ring has brought, not the next step or an attention."""
    todo, seen = list(window.readers), set[Node]()
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if is_collective(node) or as_attention(node) is not None:
            return False
        if not is_compute(node):
            todo += node.users
    return bool(window.readers)


def _device(c: Collective) -> str:
    value = tensor_of(c.node)
    return "" if value is None else value.device.type


@dataclass(slots=True)
class _Order:
    """The order of a graph's nodes while windows are widened, with a clock and the time when the link is free."""

    items: list[Node]
    us: Callable[[Node], float]
    gathers: Collection[Node] = ()
    """Collectives, and their waits, that may be advanced."""
    reductions: Collection[Node] = ()
    """Those that may be delayed."""
    fixed: Collection[Node] = ()
    """Collectives into whose windows nothing moves. What is in them is not taken from them."""
    moved_for: dict[Node, list[Node]] = field(default_factory=dict)
    """What moved into the window of each collective."""
    link_free: float = 0.0
    read: list[Node] = field(default_factory=list)
    """The first readers of earlier windows."""
    _clock: dict[Node, float] = field(init=False)

    def __post_init__(self) -> None:
        self._clock = {n: self.us(n) for n in self.items}

    @property
    def moved(self) -> set[Node]:
        """All nodes that moved."""
        return {n for nodes in self.moved_for.values() for n in nodes}

    def widen(self, narrow: _Narrow) -> None:
        """Move as many nodes into one window as hide its transfer, behind the transfers that started earlier."""
        window = narrow.window
        position = {n: i for i, n in enumerate(self.items)}
        at = position[window.collective.node]
        first = min((position[n] for n in window.readers), default=len(self.items) - 1)
        begin, hidden = self._sum_us(0, at), self._sum_us(at, first)
        if window.collective.node in self.fixed:
            hidden = math.inf
        needed = (max(0.0, self.link_free - begin) + narrow.transfer_us) * (1 + SLACK) + SLACK_US
        if hidden < needed:
            delayed = self._find_delayed(position, at, needed - hidden)
            begin, hidden = begin - self.total_us(delayed), hidden + self.total_us(delayed)
            self._move(delayed, at + 1, window)
        if hidden < needed:
            position = {n: i for i, n in enumerate(self.items)}
            self._move(self._find_advanced(position, first, window, needed - hidden), first, window)
        self.link_free = max(begin, self.link_free) + narrow.transfer_us
        self.read += [n for n in window.readers if position[n] == first]

    def _sum_us(self, begin: int, end: int) -> float:
        return self.total_us(self.items[begin:end])

    def total_us(self, nodes: Sequence[Node]) -> float:
        return sum(self._clock[n] for n in nodes)

    def _find_delayed(self, position: dict[Node, int], at: int, missing_us: float) -> list[Node]:
        """Return nodes in front of the collective at position `at` that may run behind it, in order.

        What fills the window of an earlier collective is not taken from it.
        """
        last = max([position[n] for n in self.read if position[n] <= at], default=0)
        delayed: set[Node] = set()
        for i in range(at - 1, max(last, at - REACH) - 1, -1):
            node = self.items[i]
            if missing_us <= 0 or is_barrier(node):
                break
            can_move = may_move(node) or node in self.reductions
            if can_move and all(u in delayed or position[u] > at for u in node.users):
                delayed.add(node)
                missing_us -= self._clock[node]
        return self._worthwhile(delayed, position)

    def _find_advanced(self, position: dict[Node, int], first: int, window: Window, missing_us: float) -> list[Node]:
        """Return nodes behind the first reader, at position `first`, that may run in front of it, in order."""
        results = {window.collective.wait, *window.trail}
        by_host = bool(host_reads(window.collective))
        advanced: set[Node] = set()
        for node in self.items[first : first + REACH]:
            if missing_us <= 0 or is_barrier(node):
                break
            inputs, can_move = node.all_input_nodes, may_move(node) or node in self.gathers
            if can_move and all(i in advanced or (position[i] < first and i not in results) for i in inputs):
                advanced.add(node)
                missing_us -= self._clock[node] if self._fills(node, by_host) else 0.0
        return self._worthwhile(self._with_time(advanced, by_host), position)

    def _fills(self, node: Node, by_host: bool) -> bool:
        """Return whether `node` is advanced for its own sake. `by_host`: the host reads numbers for the exchange.

        Behind such an exchange the host has issued nothing yet. So what takes the host longer than the device stays in its
        place: the host would come later to what is behind the window.
        """
        return self._clock[node] > (host_us(node.target) if by_host and not is_compute(node) else 0.0)

    def _with_time(self, nodes: set[Node], by_host: bool) -> set[Node]:
        """Return those of `nodes` that take time, and what feeds them. Gathers for later readers stay where they are."""
        kept, todo = set[Node](), [n for n in nodes if self._fills(n, by_host)]
        while todo:
            node = todo.pop()
            if node not in kept:
                kept.add(node)
                todo += [i for i in node.all_input_nodes if i in nodes]
        return kept

    def _worthwhile(self, nodes: set[Node], position: dict[Node, int]) -> list[Node]:
        """Return `nodes` in order; none if they take no time."""
        return sorted(nodes, key=position.__getitem__) if self.total_us(list(nodes)) > 0 else []

    def _move(self, nodes: list[Node], position: int, window: Window) -> None:
        """Move `nodes`, in their order, in front of the item at `position`, into `window`."""
        if not nodes:
            return
        self.moved_for.setdefault(window.collective.node, []).extend(nodes)
        inside = set(nodes)
        parts = self.items[:position], nodes, self.items[position:]
        self.items = [n for part in parts for n in part if part is nodes or n not in inside]


def may_move(node: Node) -> bool:
    """Return whether `node` may run at another place that its inputs and readers allow."""
    if node.op == "get_attr":
        return True
    if node.meta.get("unbacked_bindings"):  # the host reads a number there, and launches nothing until it is known
        return False
    is_plain = node.op == "call_function" and not is_collective(node) and node.target is not c10d.wait_tensor.default
    return is_plain and not is_mutable(node) and not is_random(node) and not node.is_impure()


def is_barrier(node: Node) -> bool:
    """Return whether no node may pass `node`: it may write. Of higher-order ops those of attention are known to be pure."""
    if node.op in ("placeholder", "output") or is_mutable(node):
        return True
    return isinstance(node.target, compat.HigherOrderOperator) and as_attention(node) is None

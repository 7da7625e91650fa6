"""A topological order of a graph that stays valid while sites are fused.

Fusing the nodes of a site into one op is legal when no path leaves the site and comes back. `FusionOrder.fuse` proves that.
It moves the site behind its last input, moves everything that needs its results behind the site, and moves nothing else.
Proof and move look only at the stretch between the site's first node and its last input or last node. So views stand directly
behind what they view: a forward saves views of gathered weights at its end, and each site would reach there. The cost is then
linear in the size of the graph.
"""

from __future__ import annotations

from collections.abc import Collection

from torch.fx import Graph, Node

from ..graph.aten import alias_base, c10d, is_mutable, is_random, readers
from ..plan.reasons import Reason
from .site import Miss


class FusionOrder:
    """The order of a graph's nodes, with the sites fused so far as single items."""

    def __init__(self, graph: Graph) -> None:
        self.items: list[Node] = _with_early_views(graph)
        self.position: dict[Node, int] = {n: i for i, n in enumerate(self.items)}
        self.begin = next((i for i, n in enumerate(self.items) if n.op != "placeholder"), len(self.items))
        """The position behind the graph's inputs, which come first."""
        self._writes = {n for n in self.items if is_mutable(n)}
        self._random = {n for n in self.items if is_random(n)}
        self._fused: dict[Node, tuple[Node, ...]] = {}
        self._done: list[tuple[tuple[Node, ...], int, list[Node] | None]] = []
        """The log that `back` undoes: (site, position, former nodes there) of a fuse, (site, 0, None) of a release."""

    @property
    def taken(self) -> Collection[Node]:
        """The nodes of all fused sites."""
        return self._fused.keys()

    def span(self, node: Node) -> tuple[int, int]:
        """Return the first and the last position of the item that `node` is part of: itself, or a fused site."""
        group = self._fused.get(node, (node,))
        return self.position[group[0]], self.position[group[-1]]

    def release(self, members: Collection[Node]) -> None:
        """Dissolve a fused site. The order stays valid, as a fused site only adds constraints."""
        group = self._fused[next(iter(members))]
        for m in group:
            del self._fused[m]
        self._done.append((group, 0, None))

    def mark(self) -> int:
        """Return a point that `back` can return to."""
        return len(self._done)

    def back(self, mark: int) -> None:
        """Undo everything since `mark`, including moves."""
        while len(self._done) > mark:
            group, first, before = self._done.pop()
            if before is None:
                self._fused.update(dict.fromkeys(group, group))
                continue
            for m in group:
                del self._fused[m]
            self._put(first, before)

    def _inputs(self, inside: set[Node]) -> set[Node]:
        """Nodes outside that the members need. A fused site is needed as a whole."""
        inputs = {i for m in inside for i in m.all_input_nodes if i not in inside}
        for i in list(inputs):
            inputs.update(self._fused.get(i, ()))
        return inputs

    def conflicts(self, members: Collection[Node]) -> set[Node]:
        """Return the nodes outside that a member needs and that need a member. Empty: the members can be fused."""
        inside = set(members)
        inputs = self._inputs(inside)
        return self._after(inside, max((self.position[n] for n in inputs), default=-1)) & inputs

    def _after(self, inside: set[Node], last: int) -> set[Node]:
        """Nodes up to position `last`, outside of `inside`, that need elements of a member (not only its sizes)."""
        seen: set[Node] = set()
        todo = [u for m in inside for u in readers(m)]
        while todo:
            node = todo.pop()
            if node in seen or node in inside or self.position[node] > last:
                continue
            seen.add(node)
            # A fused site is one item: a node that needs one of its members waits for all of them.
            for member in self._fused.get(node, (node,)):
                seen.add(member)
                todo += readers(member)
        return seen

    def fuse(self, members: Collection[Node]) -> Miss | None:
        """Make `members` one item of the order. Return the reason if they cannot be."""
        inside = set(members)
        if any(m in self._fused for m in members):
            return Miss(Reason.MATMUL_TAKEN, "a node of the site belongs to another site")
        inputs = self._inputs(inside)
        first, last = min(self.position[m] for m in members), max(self.position[n] for n in (*inputs, *inside))
        after = self._after(inside, last)
        if crossing := after & inputs:
            name = min(crossing, key=self.position.__getitem__).name
            return Miss(Reason.DEPENDENT_OPERAND, f"{name} needs a result of the site and feeds it")
        window = self.items[first : last + 1]
        if barrier := next((n for n in window if n in self._writes and n not in inside), None):
            return Miss(Reason.MUTATION_BARRIER, f"{barrier.name} ({barrier.target}) lies between the nodes of the site")
        moves_back = [n in after for n in window if n in self._random]
        if moves_back != sorted(moves_back):
            return Miss(Reason.MUTATION_BARRIER, "random ops between the nodes of the site would run in another order")
        ordered = sorted(inside, key=self.position.__getitem__)
        layout = [n for n in window if n not in inside and n not in after] + ordered + [n for n in window if n in after]
        group = tuple(ordered)
        self._done.append((group, first, window))
        self._put(first, layout)
        for m in members:
            self._fused[m] = group
        return None

    def _put(self, first: int, nodes: list[Node]) -> None:
        self.items[first : first + len(nodes)] = nodes
        for i, n in enumerate(nodes, first):
            self.position[n] = i


def _with_early_views(graph: Graph) -> list[Node]:
    """Return the nodes in graph order, but views of what the graph computes directly behind it. Waits keep their places."""
    views: dict[Node, list[Node]] = {}
    order: list[Node] = []
    for n in graph.nodes:
        is_view = len(n.all_input_nodes) == 1 and not is_mutable(n) and n.target is not c10d.wait_tensor.default
        base = alias_base(n) if is_view else None
        if base is not None and base.op != "placeholder":
            views.setdefault(base, []).append(n)
        else:
            order.append(n)
    todo, order = order[::-1], []
    while todo:
        n = todo.pop()
        order.append(n)
        todo += reversed(views.get(n, ()))
    return order

"""A topological order of a graph that stays one while sites are fused.

Fusing the nodes of a site into one op is legal when no path leaves the site and comes back. `FusionOrder.fuse` proves that and moves
the site behind its last input, everything that needs its results behind it, and nothing else. The proof and the
move look only at the stretch between the site's first node and its last input, so the cost of a graph is linear in it.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch.fx import Graph, Node

from ub_overlap import _torch_compat as compat

from ..graph.aten import readers
from ..plan.reasons import Reason
from .site import Miss


class FusionOrder:
    def __init__(self, graph: Graph) -> None:
        self.items: list[Node] = list(graph.nodes)
        self.position: dict[Node, int] = {n: i for i, n in enumerate(graph.nodes)}
        self._fused: dict[Node, tuple[Node, ...]] = {}
        self._done: list[tuple[tuple[Node, ...], int, list[Node] | None]] = []
        """(site, position, what stood there) of every fuse, (site, 0, None) of every release: `back` undoes them."""

    @property
    def taken(self) -> Collection[Node]:
        """The members of every site fused so far."""
        return self._fused.keys()

    def release(self, members: Collection[Node]) -> None:
        """Takes a fused site apart. The order stays one: fusing only ever asked for more."""
        group = self._fused[next(iter(members))]
        for m in group:
            del self._fused[m]
        self._done.append((group, 0, None))

    def mark(self) -> int:
        """Where `back` may return to."""
        return len(self._done)

    def back(self, mark: int) -> None:
        """Undoes everything since `mark`, the moves too."""
        while len(self._done) > mark:
            group, first, before = self._done.pop()
            if before is None:
                self._fused.update(dict.fromkeys(group, group))
                continue
            for m in group:
                del self._fused[m]
            self._put(first, before)

    def _inputs(self, inside: set[Node]) -> set[Node]:
        """What the members need from outside; a fused site is needed as a whole."""
        inputs = {i for m in inside for i in m.all_input_nodes if i not in inside}
        for i in list(inputs):
            inputs.update(self._fused.get(i, ()))
        return inputs

    def _last(self, inside: set[Node], inputs: set[Node]) -> int:
        return max(self.position[n] for n in (*inputs, *inside))

    def conflicts(self, members: Collection[Node]) -> set[Node]:
        """The nodes outside that a member needs and that need a member (empty: the members can be fused)."""
        inside = set(members)
        inputs = self._inputs(inside)
        return self._after(inside, self._last(inside, inputs)) & inputs

    def _after(self, inside: set[Node], last: int) -> set[Node]:
        """Everything up to position `last`, outside of `inside`, that reads a member's elements (sizes do not count)."""
        seen: set[Node] = set()
        todo = [u for m in inside for u in readers(m)]
        while todo:
            node = todo.pop()
            if node in seen or node in inside or self.position[node] > last:
                continue
            seen.add(node)
            # A fused site is entered and left as one: what needs any of its members waits for all of them.
            for member in self._fused.get(node, (node,)):
                seen.add(member)
                todo += readers(member)
        return seen

    def fuse(self, members: Collection[Node]) -> Miss | None:
        """Makes `members` one item of the order, or says why they cannot be."""
        inside = set(members)
        if any(m in self._fused for m in members):
            return Miss(Reason.MATMUL_TAKEN, "a node of the site belongs to another site")
        inputs = self._inputs(inside)
        first, last = min(self.position[m] for m in members), self._last(inside, inputs)
        after = self._after(inside, last)
        if crossing := after & inputs:
            name = min(crossing, key=self.position.__getitem__).name
            return Miss(Reason.DEPENDENT_OPERAND, f"{name} needs a result of the site and feeds it")
        window = self.items[first : last + 1]
        if wall := next((n for n in window if _has_effects(n) and n not in inside), None):
            return Miss(Reason.MUTATION_BARRIER, f"{wall.name} ({wall.target}) lies between the nodes of the site")
        late = [n in after for n in window if _is_random(n)]
        if late != sorted(late):
            return Miss(Reason.MUTATION_BARRIER, "random numbers between the nodes of the site would be drawn in another order")
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


def _has_effects(node: Node) -> bool:
    """Does `node` write to a tensor (functional collectives and their waits only look impure)?"""
    if node.op != "call_function" or not isinstance(node.target, compat.OpOverload):
        return False
    return node.target._schema.is_mutable


def _is_random(node: Node) -> bool:
    return isinstance(node.target, compat.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags

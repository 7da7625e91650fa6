"""Bytes that live along a graph, and what a fused site would add: its operands wait for it, its results come with it.

A site runs where its last input is ready. What it reads lives until then, what it would have made later lives from then on.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from ..cost.amounts import about
from ..cost.of_site import Hints
from ..sites.sizes import number_of, product, sizes
from ..sites.values import aliased

MORE_SHARE = 0.05
MORE_BYTES = 256 << 20
"""The graph's peak may grow by the larger of these: a share of itself, bytes."""

Holds = list[tuple[int, int, int]]
"""(from, to, bytes): positions between which more lives."""


@dataclass(slots=True)
class Memory:
    """`live`: bytes alive at each position of the graph. `most`: what they may grow to."""

    position: dict[Node, int]
    last: dict[Node, int]
    bytes: dict[Node, int]
    base: dict[Node, Node]
    live: list[int]
    most: int

    @classmethod
    def of(cls, graph: Graph, hints: Hints, more: int | None = None) -> Memory:
        """`more`: bytes that the peak may grow by (None: the larger of the two above)."""
        position = {n: i for i, n in enumerate(graph.nodes)}
        base: dict[Node, Node] = {}
        last: dict[Node, int] = {}
        for n in graph.nodes:
            source = aliased(n)
            base[n] = n if source is None else base[source]
            for i in n.all_input_nodes:
                last[base[i]] = position[n]
        size = {n: _bytes(n, hints) for n in graph.nodes if base[n] is n}
        change = [0] * (len(position) + 1)
        for n, b in size.items():
            if _ours(n):
                change[position[n] if n.op != "placeholder" else 0] += b
                change[last.get(n, position[n]) + 1] -= b
        live, now = [], 0
        for c in change[:-1]:
            now += c
            live.append(now)
        peak = max(live, default=0)
        return cls(position, last, size, base, live, peak + (max(int(MORE_SHARE * peak), MORE_BYTES) if more is None else more))

    def holds(self, members: Collection[Node]) -> Holds:
        """What `members` hold longer, and make earlier, as one op."""
        inside = set(members)
        at = self.position
        inputs = {i: None for m in members for i in m.all_input_nodes if i not in inside}
        # Beside each other in time: where the last input is ready, or where the first of them was.
        runs = max([at[i] + 1 for i in inputs] + [min(at[m] for m in members)])
        found = []
        for i in {self.base[i]: None for i in inputs}:
            if _ours(i) and self.last[i] < runs:
                found.append((self.last[i] + 1, runs, self.bytes[i]))
        for m in members:
            if at[m] > runs and self.base[m] is m:
                found.append((runs, at[m], self.bytes[m]))
        return found

    def fits(self, holds: Holds) -> bool:
        """Does what lives stay below the limit with `holds`? (Taken as if all of them overlapped.)"""
        if not holds:
            return True
        begin, end = min(h[0] for h in holds), max(h[1] for h in holds)
        return max(self.live[begin : end + 1], default=0) + sum(h[2] for h in holds) <= self.most

    def add(self, holds: Holds, sign: int = 1) -> None:
        """What is held from now on (sign -1: no longer)."""
        for begin, end, more in holds:
            for i in range(begin, min(end + 1, len(self.live))):
                self.live[i] += sign * more


def _ours(node: Node) -> bool:
    """Does the graph decide how long its memory lives? Parameters and inputs stay where they are."""
    return node.op == "call_function" or (node.op == "placeholder" and not node.name.startswith(("primals", "arg")))


def _bytes(node: Node, hints: Hints) -> int:
    """Of all tensors that a node makes, about; 0 where a size has no value."""
    value = node.meta.get("val")
    total = 0
    for t in value if isinstance(value, list | tuple) else (value,):
        if isinstance(t, torch.Tensor):
            total += about(number_of(product(sizes(t.shape)), hints) or 0) * t.element_size()
    return total

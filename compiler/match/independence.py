"""The matmuls that are independent of a collective: they neither need it nor feed it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from torch.fx import Graph, Node

from ..graph.matmul import Matmul, as_matmul, is_matmul

SEARCH_LIMIT = 64
"""Matmuls examined on each side of a collective: those of a few layers. Keeps the pass linear in the depth of the model."""
MATMUL_LIMIT = 16
"""Independent matmuls kept per collective, nearest first. More could not hide more, and their operands would live longer."""


class IndependentMatmuls:
    """Independence of matmuls and collectives, from one sweep over the graph.

    Each collective and each matmul has one bit. A node's mask has the bits of everything that it needs.
    """

    def __init__(self, graph: Graph, collectives: list[Node], position: dict[Node, int]) -> None:
        self._position = position
        self._matmuls = {n: p for n in graph.nodes if is_matmul(n) and (p := as_matmul(n)) and p.bias is None and not p.scales}
        self._bit = {n: 1 << i for i, n in enumerate([*collectives, *self._matmuls])}
        self._needs: dict[Node, int] = {}
        for n in graph.nodes:
            needs = self._bit.get(n, 0)
            for i in n.all_input_nodes:
                needs |= self._needs[i]
            self._needs[n] = needs
        self._ordered = list(self._matmuls)
        self._positions = [position[n] for n in self._ordered]

    def find(self, collective: Node) -> list[Matmul]:
        """Return up to `MATMUL_LIMIT` independent matmuls, nearest in graph order first."""
        bit, needs, position = self._bit[collective], self._needs[collective], self._position[collective]
        index = bisect_left(self._positions, position)
        before = self._ordered[max(0, index - SEARCH_LIMIT) : index][::-1]
        after = self._ordered[index : index + SEARCH_LIMIT]
        independent = []
        for n in merge_nearest(before, after, self._position, position):
            if not (self._needs[n] & bit) and not (needs & self._bit[n]):
                independent.append(self._matmuls[n])
                if len(independent) == MATMUL_LIMIT:
                    break
        return independent


def merge_nearest(before: list[Node], after: list[Node], position: dict[Node, int], center: int) -> Iterator[Node]:
    """Merge `before` (backward) and `after` (forward) by distance from position `center`."""
    i = j = 0
    while i < len(before) or j < len(after):
        left = center - position[before[i]] if i < len(before) else None
        right = position[after[j]] - center if j < len(after) else None
        if right is None or (left is not None and left <= right):
            yield before[i]
            i += 1
        else:
            yield after[j]
            j += 1

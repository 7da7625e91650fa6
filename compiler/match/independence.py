"""The matmuls that are independent of a collective: they neither need it nor feed it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import zip_longest

import torch
from torch.fx import Graph, Node

from ..graph.aten import tensor_of
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
        self._matmuls = {n: p for n in graph.nodes if is_matmul(n) and (p := as_matmul(n)) and not p.scales}
        self._bit = {n: 1 << i for i, n in enumerate([*collectives, *self._matmuls])}
        self._position = position
        self._needs: dict[Node, int] = {}
        for n in graph.nodes:
            needs = self._bit.get(n, 0)
            for i in n.all_input_nodes:
                needs |= self._needs[i]
            self._needs[n] = needs
        self._ordered = list(self._matmuls)
        self._positions = [position[n] for n in self._ordered]

    def find(self, collective: Node) -> list[Matmul]:
        """Return up to `MATMUL_LIMIT` independent matmuls on the collective's device, nearest in graph order first.

        Distance counts matmuls, not nodes: ranks may have different nodes in between, such as a bias on one rank only.
        """
        bit, needs = self._bit[collective], self._needs[collective]
        index = bisect_left(self._positions, self._position[collective])
        before = self._ordered[max(0, index - SEARCH_LIMIT) : index][::-1]
        after = self._ordered[index : index + SEARCH_LIMIT]
        independent = []
        for n in interleave(before, after):
            if not (self._needs[n] & bit) and not (needs & self._bit[n]) and _device_of(n) == _device_of(collective):
                independent.append(self._matmuls[n])
                if len(independent) == MATMUL_LIMIT:
                    break
        return independent


def interleave(before: Sequence[Node], after: Sequence[Node]) -> Iterator[Node]:
    """Yield the nodes of `before` and `after` in turn, and the rest of the longer one."""
    for pair in zip_longest(before, after):
        yield from (n for n in pair if n is not None)


def _device_of(node: Node) -> torch.device | None:
    value = tensor_of(node)
    return None if value is None else value.device

"""Put the nodes of a graph in another order."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch.fx import Node


def arrange(nodes: Sequence[Node]) -> None:
    """Put all nodes of a graph in this order. The first one stays the first."""
    for before, node in pairwise(nodes):
        before.append(node)

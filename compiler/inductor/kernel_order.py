"""The order of a graph after Inductor has fused its nodes: that of the plan again, as far as dependencies allow.

Inductor puts a kernel fused from several nodes at the place of the first one, and everything it depends on in front of it.
A kernel that adds to the gradient of one layer and sums that of another then draws whole layers forward, past the starts of
collectives that they were to hide.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from ub_overlap import _torch_compat as compat

_COMMUNICATION = ("ub_overlap", "_c10d_functional")
"""Namespaces of ops that stay in the order of the graph among each other: ranks whose kernels differ must agree on it."""


def keep_order() -> None:
    """Let Inductor keep the order of the graph that it compiles now: it moves nothing, and what fusion moved goes back."""
    compat.keep_order(in_order)


def in_order(kernels: Sequence[Any]) -> list[Any]:
    """Return Inductor's nodes behind fusion so that each runs at the place of its first operation, or when it is ready.

    A kernel that is not ready draws nothing forward; what reads it waits with it.
    """
    of_buffer = {name: i for i, kernel in enumerate(kernels) for name in kernel.get_buffer_names()}
    data = [
        {of_buffer[d.name] for d in kernel.unmet_dependencies if d.name in of_buffer} - {i} for i, kernel in enumerate(kernels)
    ]
    communication = sorted((i for i, kernel in enumerate(kernels) if _communicates(kernel)), key=lambda i: kernels[i].min_order)
    order = _sorted(data, dict(pairwise(communication)), lambda i: (kernels[i].min_order, i))
    return [kernels[i] for i in order]


def _sorted(data: Sequence[set[int]], next_of: dict[int, int], place: Callable[[int], Any]) -> list[int]:
    """Return all items: each behind its `data`, and the next one of a chain behind the one before it unless data forbid that.

    Of the items that are ready the one with the lowest place is next.
    """
    waits_for = list(map(set, data))
    for before, behind in next_of.items():
        waits_for[behind].add(before)
    readers: dict[int, list[int]] = defaultdict(list)
    for item, needed in enumerate(waits_for):
        for one in needed:
            readers[one].append(item)
    ready = [(place(item), item) for item, needed in enumerate(waits_for) if not needed]
    heapq.heapify(ready)
    order: list[int] = []
    done: set[int] = set()
    while len(order) < len(data):
        if not ready:  # fusion has made an op of the chain depend on a later one
            free = [i for i, needed in enumerate(data) if i not in done and needed <= done]
            ready = [min((place(i), i) for i in free)]
        _, item = heapq.heappop(ready)
        if item in done:
            continue
        done.add(item)
        order.append(item)
        for reader in readers[item]:
            waits_for[reader].discard(item)
            if not waits_for[reader]:
                heapq.heappush(ready, (place(reader), reader))
    return order


def _communicates(kernel: Any) -> bool:
    op = getattr(getattr(kernel, "node", None), "op_overload", None)
    return op is not None and op.namespace in _COMMUNICATION

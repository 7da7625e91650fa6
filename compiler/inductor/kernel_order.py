"""The order of a graph's kernels in Inductor's scheduler: that of the plan, where fusion leaves a choice.

Inductor puts a kernel fused from several nodes at the place of the first one, and everything it depends on in front of it.
A kernel that sums the norms of two layers then draws whole layers forward, past the starts of collectives that they were to
hide. And it merges nodes so that one collective comes to depend on a later one.
"""

from __future__ import annotations

import functools
import heapq
import logging
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from ub_overlap import _torch_compat as compat
from ub_overlap.runtime import ops

from .order_options import set_passes

log = logging.getLogger(__name__)


def keep_order() -> None:
    """Let Inductor keep the order of the graph that it compiles now: it moves nothing, and what fusion moved goes back."""
    set_passes(chain_collectives, in_order)


def chain_collectives(kernels: Sequence[Any]) -> list[Any]:
    """Let each communicating op of Inductor's nodes, in front of fusion, depend on the one before it. Return the nodes.

    Fusion then merges no nodes that would reverse two of them: all ranks must issue them in one order.
    """
    chain = [kernel for kernel in kernels if _communicates(kernel)]
    orders_only = functools.partial(compat.__getattr__("WeakDep"), is_fake=True)  # keeps no memory
    for before, behind in pairwise(chain):
        behind.add_fake_dep(orders_only(next(iter(before.get_buffer_names())), behind.get_name()))
    _extend_ancestors(kernels, chain[1:])
    return list(kernels)


def _extend_ancestors(kernels: Sequence[Any], changed: Sequence[Any]) -> None:
    """Add to the ancestors of nodes, by which fusion finds cycles, what `changed` and all behind them now depend on."""
    of_buffer = _producers(kernels)
    grown = set(map(id, changed))
    for kernel in kernels:  # each behind all that it depends on
        needed = [(d.name, kernels[of_buffer[d.name]]) for d in kernel.unmet_dependencies if d.name in of_buffer]
        if id(kernel) not in grown and all(id(source) not in grown for _, source in needed):
            continue
        grown.add(id(kernel))
        found = type(kernel.ancestors)()
        for name, source in needed:
            if source is not kernel:
                found |= source.ancestors
                found.add(kernel.scheduler.name_to_buf[name].defining_op_name())
        for part in (kernel, *kernel.get_nodes()):
            part.ancestors = found


def in_order(kernels: Sequence[Any]) -> list[Any]:
    """Return Inductor's nodes, behind fusion, so that each runs at the place of its first operation, or when it is ready.

    A kernel that is not ready draws nothing forward; what reads it waits with it. What a communicating op reads is drawn
    forward to the place of that op, unless another one is in between.
    """
    of_buffer = _producers(kernels)
    needed = [
        {of_buffer[d.name] for d in kernel.unmet_dependencies if d.name in of_buffer} - {i} for i, kernel in enumerate(kernels)
    ]
    order = _sorted(needed, _places(kernels, needed))
    if len(order) < len(kernels):  # Inductor sorts these as well, and reads what is not there yet
        log.warning("%d of %d kernels depend on each other; their order stays", len(kernels) - len(order), len(kernels))
        return list(kernels)
    return [kernels[i] for i in order]


def _producers(kernels: Sequence[Any]) -> dict[str, int]:
    """Return by buffer the position of the kernel that writes it."""
    return {name: i for i, kernel in enumerate(kernels) for name in kernel.get_buffer_names()}


def _places(kernels: Sequence[Any], needed: Sequence[set[int]]) -> list[tuple[int, int]]:
    """Return for each kernel the place of its first operation, or that of the first communicating op which needs it."""
    places = [kernel.min_order for kernel in kernels]
    communicating = {i for i, kernel in enumerate(kernels) if _communicates(kernel)}
    seen: set[int] = set()
    for one in sorted(communicating, key=lambda i: kernels[i].min_order):
        todo = list(needed[one])
        while todo:
            i = todo.pop()
            if i not in seen and i not in communicating:
                seen.add(i)
                places[i] = min(places[i], places[one])
                todo += needed[i]
    return [(place, kernel.min_order) for place, kernel in zip(places, kernels, strict=True)]


def _sorted(needed: Sequence[set[int]], places: Sequence[tuple[int, int]]) -> list[int]:
    """Return the items, each behind those that it needs; of the ready ones that with the lowest place is next.

    Items of a cycle, and what needs them, are left out.
    """
    readers: dict[int, list[int]] = defaultdict(list)
    for item, all_needed in enumerate(needed):
        for one in all_needed:
            readers[one].append(item)
    left = [len(all_needed) for all_needed in needed]
    ready = [(places[item], item) for item, count in enumerate(left) if count == 0]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        _, item = heapq.heappop(ready)
        order.append(item)
        for reader in readers[item]:
            left[reader] -= 1
            if left[reader] == 0:
                heapq.heappush(ready, (places[reader], reader))
    return order


@functools.cache
def _own_names() -> frozenset[str]:
    return frozenset(name for definition in ops.DEFINITIONS.values() for name in (definition.name, f"{definition.name}_flat"))


def _communicates(kernel: Any) -> bool:
    """Return whether a kernel is an op of ours that communicates, or a collective of c10d."""
    op: Any = getattr(getattr(kernel, "node", None), "op_overload", None)
    space = getattr(op, "namespace", "")
    if space not in ("ub_overlap", "_c10d_functional"):
        return False
    name = op.name().partition("::")[2].partition(".")[0]
    return name in _own_names() if space == "ub_overlap" else name != "wait_tensor"

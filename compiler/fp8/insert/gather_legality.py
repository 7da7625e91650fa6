"""Which all_gathers may carry float8 instead of 16 bits: those whose every reader can do with it.

Readers: products that take float8 (the axis of their scales must not cross shards), weight gradients and sums over rows (bias
gradients), which read the dequantised value. Anything else needs the 16 bits themselves, which then travel, and the quantised
tensor is made from them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator

from torch.fx import Graph, Node

from ...graph.aten import CUTS, aten, c10d, dtype_of, readers
from ..provenance import Axis, before, step_back
from ..recipe import NARROW

Wanted = Callable[[Node, Node], list[Axis] | None]
"""(reader, value) -> the axes of the twins of `value` that the reader needs; None where it needs the value itself."""


def travelling(graph: Graph, wanted: Wanted, scaled: Container[Node]) -> set[Node]:
    """The all_gathers of `graph` that may carry float8: of 16-bit values that a product of `scaled` reads."""
    gathers = graph.find_nodes(op="call_function", target=c10d.all_gather_into_tensor.default)
    return {n for n in gathers if dtype_of(n) in NARROW and _fits(n, wanted, scaled)}


def _fits(gather: Node, wanted: Wanted, scaled: Container[Node]) -> bool:
    waits = list(gather.users)
    if len(waits) != 1 or waits[0].target is not c10d.wait_tensor.default or not isinstance(gather.args[2], str):
        return False
    uses = list(_uses(waits[0]))
    if not any(reader in scaled for reader, _ in uses):
        return False
    for reader, value in uses:
        axes = wanted(reader, value)
        if axes is None or not all(_comes_from(value, waits[0], axis) for axis in axes):
            return False
    return True


def _uses(wait: Node) -> Iterator[tuple[Node, Node]]:
    """(reader, value) of everything that reads the gathered elements and does not only hand them on."""
    seen, todo = {wait}, [wait]
    while todo:
        node = todo.pop()
        for user in readers(node):
            between = user.target in CUTS or user.target is aten.slice.Tensor or node.target in CUTS
            if between or _hands_on(user, node, seen):
                if user not in seen:
                    seen.add(user)
                    todo.append(user)
            else:
                yield user, node


def _hands_on(user: Node, node: Node, seen: set[Node]) -> bool:
    """Is `user` the same elements in another form? (Of a cat: of the value whose pieces it joins.)"""
    found = before(user)
    return found is node or (user.target is aten.cat.default and found in seen)


def _comes_from(node: Node, wait: Node, axis: Axis) -> bool:
    while node is not wait:
        found = step_back(node, axis)
        if found is None:
            return False
        node, axis = found
    return step_back(wait, axis) is not None

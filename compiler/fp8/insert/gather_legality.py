"""Decide which all_gathers may carry float8 instead of 16 bits: those whose readers all accept it.

These readers do: float8 matmuls whose scale axis does not cross shards; weight gradients and sums over rows (bias gradients),
which read the dequantized value. Any other reader needs the 16 bits. The gather then carries them, and the quantized tensor is
computed from its result.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator

from torch.fx import Graph, Node

from ...graph.aten import c10d, dtype_of, readers
from ..provenance import Axis, carries_elements, step_to_source
from ..recipe import NARROW

ScaleAxes = Callable[[Node, Node], list[Axis] | None]
"""(reader, value) -> the axes of the quantized values that the reader needs of `value`; None: it needs `value` itself."""


def find_float8_gathers(graph: Graph, scale_axes: ScaleAxes, scaled: Container[Node]) -> set[Node]:
    """Return the all_gathers of 16-bit values that may carry float8: a matmul of `scaled` reads each of them."""
    gathers = graph.find_nodes(op="call_function", target=c10d.all_gather_into_tensor.default)
    return {n for n in gathers if dtype_of(n) in NARROW and _is_legal(n, scale_axes, scaled)}


def _is_legal(gather: Node, scale_axes: ScaleAxes, scaled: Container[Node]) -> bool:
    waits = list(gather.users)
    if len(waits) != 1 or waits[0].target is not c10d.wait_tensor.default or not isinstance(gather.args[2], str):
        return False
    uses = list(_element_uses(waits[0]))
    if not any(reader in scaled for reader, _ in uses):
        return False
    for reader, value in uses:
        axes = scale_axes(reader, value)
        if axes is None or not all(_has_unsplit_lines(value, waits[0], axis) for axis in axes):
            return False
    return True


def _element_uses(wait: Node) -> Iterator[tuple[Node, Node]]:
    """Yield (reader, value) for the readers of the gathered elements that do not only pass them on."""
    seen, todo = {wait}, [wait]
    while todo:
        node = todo.pop()
        for user in readers(node):
            if not carries_elements(user, node, seen, exact=False):
                yield user, node
            elif user not in seen:
                seen.add(user)
                todo.append(user)


def _has_unsplit_lines(value: Node, wait: Node, axis: Axis) -> bool:
    """Return whether no line of `value` along `axis` crosses shards of the gather of `wait`."""
    while value is not wait:
        step = step_to_source(value, axis)
        if step is None:
            return False
        value, axis = step
    return step_to_source(wait, axis) is not None

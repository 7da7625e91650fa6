"""Rows of an all_to_all that are read in another order are copied out of landing memory in that order.

    finish_all_to_all -> received [n, D] -> index(received, [order])        two copies of all rows
becomes
    finish_all_to_all(order) -> rows [n, D]                                 one

Models with experts sort what arrives by local expert, in front of the grouped matmuls, and its gradient likewise. The matmuls
need these rows in memory in any case. Where fewer or more rows are read than arrive, Inductor may compute the read together
with what follows, so it stays. An order that is computed behind the finish stays too: what is sent, and landing memory, are the
graph's until the place of the plan only.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from ..graph.aten import aten, dtype_of, shape_of, storage_node, tensor_of, written_memory
from ..graph.sizes import is_same


def read_in_order(graph: Graph) -> int:
    """Let finishes return their rows in the order in which the graph reads them, in place. Return how many do."""
    op = torch.ops.ub_overlap.finish_all_to_all.default
    finishes = graph.find_nodes(op="call_function", target=op)
    written = written_memory(graph) if finishes else set[Node]()
    count = 0
    for finish in finishes:
        if len(finish.users) != 1 or len(finish.args) == len(op._schema.arguments) or finish.kwargs:
            continue
        (index,) = finish.users
        order = _order_of(index, finish)
        if order is None or finish < order or storage_node(order) in written:
            continue
        finish.args = (*finish.args, order)
        finish.meta["val"] = index.meta["val"]
        index.replace_all_uses_with(finish)
        graph.erase_node(index)
        count += 1
    return count


def _order_of(index: Node, finish: Node) -> Node | None:
    """Return the numbers of the rows that `index` reads of `finish`, as many as there are: [n] of int64 next to them."""
    if index.target is not aten.index.Tensor or index.args[0] is not finish:
        return None
    numbers = index.args[1]
    order = numbers[0] if isinstance(numbers, (list, tuple)) and len(numbers) == 1 else None
    if not isinstance(order, Node) or order is finish:
        return None
    value, rows = tensor_of(order), tensor_of(finish)
    assert value is not None and rows is not None
    fits = value.dim() == 1 and dtype_of(order) is torch.int64 and value.device == rows.device
    return order if fits and is_same(shape_of(order)[0], shape_of(finish)[0]) else None

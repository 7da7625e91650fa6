"""Rows of an all_to_all that are read in another order are copied out of landing memory in that order.

    finish_all_to_all -> received [n, D] -> index(received, [order])        two copies of all rows
becomes
    finish_all_to_all(order) -> rows [n, D]                                 one

Models with experts sort what arrives by local expert, in front of the grouped matmuls, and its gradient likewise. The matmuls
need these rows in memory in any case. Where fewer or more rows are read than arrive, Inductor may compute the read together
with what follows, so it stays.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Graph, Node

from ..graph.aten import aten, c10d, dtype_of, shape_of, storage_node, tensor_of, written_memory
from ..graph.sizes import is_same
from ..match.collectives import is_collective


def read_in_order(graph: Graph) -> int:
    """Let finishes return their rows in the order in which the graph reads them, in place. Return how many do."""
    count = 0
    written = written_memory(graph)
    for finish in graph.find_nodes(op="call_function", target=torch.ops.ub_overlap.finish_all_to_all.default):
        index = _only_reader(finish)
        order = index and _order_of(index)
        if index is None or order is None or storage_node(order) in written:
            continue
        if finish < order:
            if any(map(_meets_peers, _between(finish, index))):
                continue  # all ranks issue these in the order of the plan
            index.prepend(finish)
        finish.args = (*finish.args, order)
        finish.meta["val"] = index.meta["val"]
        index.replace_all_uses_with(finish)
        graph.erase_node(index)
        count += 1
    return count


def _only_reader(finish: Node) -> Node | None:
    return next(iter(finish.users)) if len(finish.users) == 1 else None


def _order_of(index: Node) -> Node | None:
    """Return the numbers of the rows that `index` reads, as many as there are: [n] of int64 next to the rows. Else None."""
    if index.target is aten.index.Tensor:
        rows, numbers = index.args
        order = numbers[0] if isinstance(numbers, (list, tuple)) and len(numbers) == 1 else None
    elif index.target is aten.index_select.default and index.args[1] == 0:
        rows, _, order = index.args
    else:
        return None
    if not isinstance(order, Node) or not isinstance(rows, Node) or order is rows:
        return None
    value, read = tensor_of(order), tensor_of(rows)
    assert value is not None and read is not None
    fits = value.dim() == 1 and dtype_of(order) is torch.int64 and value.device == read.device
    return order if fits and is_same(shape_of(order)[0], shape_of(rows)[0]) else None


def _between(first: Node, last: Node) -> Iterator[Node]:
    node = first.next
    while node is not last:
        yield node
        node = node.next


def _meets_peers(node: Node) -> bool:
    """Return whether peers take part in `node`: a collective, a wait for one, or an op of this package."""
    is_own = getattr(node.target, "namespace", "") == "ub_overlap"
    return is_own or is_collective(node) or node.target is c10d.wait_tensor.default

"""Waits for tensors that are no results of collectives, which do nothing.

Under torch.compile `funcol.all_reduce(x, ...)` returns a tensor that is waited for. A program that waits for it again, as eager
code may have to, traces a second wait, behind which no pattern of a collective would be found::

    all_reduce -> wait -> wait -> reduce_scatter           all_gather -> wait -> split -> cat -> wait -> mm
"""

from __future__ import annotations

import operator

from torch.fx import Graph, Node

from ub_overlap import _torch_compat as compat

from .aten import alias_base, c10d, is_mutable, node_arg


def drop_repeated_waits(graph: Graph) -> int:
    """Replace each such wait by what it waits for. Return how many."""
    waits = graph.find_nodes(op="call_function", target=c10d.wait_tensor.default)
    repeated = [wait for wait in waits if _is_ready(node_arg(wait))]
    for wait in repeated:
        wait.replace_all_uses_with(node_arg(wait))
        graph.erase_node(wait)
    return len(repeated)


def _is_ready(node: Node) -> bool:
    """Return whether `node` is waited for, or computed by ATen, or a view of such a tensor, which nothing else writes.

    In-place collectives, and those into a given tensor, leave a tensor that is not ready.
    """
    while node.target is not c10d.wait_tensor.default:
        is_aten = isinstance(node.target, compat.OpOverload) and node.target.namespace == "aten"
        if not is_aten and node.target is not operator.getitem:
            return False
        if any(is_mutable(user) for user in node.users):
            return False
        base = alias_base(node)
        if base is None:
            return is_aten
        node = base
    return True

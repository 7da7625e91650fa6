"""The collectives of a graph, in graph order, each with its wait and its group."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from torch.fx import Graph, Node

from ub_overlap import _torch_compat as compat

from ..graph.aten import c10d


class Op(Enum):
    """The kinds of collective that can be overlapped."""

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"


_OPS = {
    c10d.all_gather_into_tensor.default: Op.ALL_GATHER,
    c10d.reduce_scatter_tensor.default: Op.REDUCE_SCATTER,
    c10d.all_reduce.default: Op.ALL_REDUCE,
}
_RANKS_ARG = {Op.ALL_GATHER: 1, Op.REDUCE_SCATTER: 2}
"""The position of the argument that is the number of ranks. For other kinds it is the size of the group."""
_REDUCE_OP_ARG = {Op.REDUCE_SCATTER: 1, Op.ALL_REDUCE: 1}
"""The position of the argument that names the reduction."""


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of a graph."""

    op: Op | None
    """None for kinds without a matcher."""
    node: Node
    wait: Node | None
    """None unless exactly one wait follows."""
    input: Node
    group: str | None
    """None where the group is a value that the graph computes."""
    ranks: int
    reduce_op: str = ""


def is_collective(node: Node) -> bool:
    """Return whether `node` starts a functional collective."""
    return (
        node.op == "call_function"
        and isinstance(node.target, compat.OpOverload)
        and node.target.namespace == "_c10d_functional"
        and "wait_tensor" not in node.target._schema.name
    )


def find_collectives(graph: Graph) -> list[Collective]:
    """Return every collective of the graph, in graph order."""
    return [read_collective(n) for n in graph.nodes if is_collective(n)]


def read_collective(node: Node) -> Collective:
    """Return the record of the collective `node`."""
    op = _OPS.get(node.target)  # type: ignore[arg-type]
    name = _group_arg(node)
    group = name if isinstance(name, str) else None
    waits = [u for u in node.users if u.target is c10d.wait_tensor.default]
    reduce_op = str(node.args[_REDUCE_OP_ARG[op]]) if op in _REDUCE_OP_ARG else ""
    return Collective(
        op=op,
        node=node,
        wait=waits[0] if len(waits) == 1 else None,
        input=_first_input(node),
        group=group,
        ranks=_rank_count(node, op, group),
        reduce_op=reduce_op,
    )


def _group_arg(node: Node) -> object:
    schema = node.target._schema  # type: ignore[union-attr]
    for i, a in enumerate(schema.arguments):
        if a.name in ("group_name", "tag"):
            return node.args[i] if i < len(node.args) else node.kwargs.get(a.name)
    return None


def _first_input(node: Node) -> Node:
    """The tensor that the collective reads; the first of them if it is coalesced."""
    tensors = node.args[0]
    return tensors if isinstance(tensors, Node) else tensors[0]  # type: ignore[index,return-value]


def _rank_count(node: Node, op: Op | None, group: str | None) -> int:
    if op in _RANKS_ARG:
        return int(node.args[_RANKS_ARG[op]])  # type: ignore[call-overload]
    return compat.group_size(group) if group is not None else 0

"""The collectives of a graph, in graph order, each with its wait and its group."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from torch.fx import Graph, Node

from ub_overlap import _torch_compat as compat

from ..graph.aten import c10d


class Op(Enum):
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"


_OPS = {
    c10d.all_gather_into_tensor.default: Op.ALL_GATHER,
    c10d.reduce_scatter_tensor.default: Op.REDUCE_SCATTER,
    c10d.all_reduce.default: Op.ALL_REDUCE,
}


@dataclass(frozen=True, slots=True)
class Collective:
    """`op` is None for kinds that no site takes; `wait` is None unless exactly one wait follows; `group` is None where it is
    a value of the graph."""

    op: Op | None
    node: Node
    wait: Node | None
    input: Node
    group: str | None
    ranks: int
    reduce_op: str = ""


def _group_arg(node: Node) -> object:
    schema = node.target._schema  # type: ignore[union-attr]
    for i, a in enumerate(schema.arguments):
        if a.name in ("group_name", "tag"):
            return node.args[i] if i < len(node.args) else node.kwargs.get(a.name)
    return None


def is_collective(node: Node) -> bool:
    return (
        node.op == "call_function"
        and isinstance(node.target, compat.OpOverload)
        and node.target.namespace == "_c10d_functional"
        and "wait_tensor" not in node.target._schema.name
    )


def find_collectives(graph: Graph) -> list[Collective]:
    """Every collective of the graph."""
    return [read_collective(n) for n in graph.nodes if is_collective(n)]


def read_collective(node: Node) -> Collective:
    """`node`, which is a collective."""
    op = _OPS.get(node.target)  # type: ignore[arg-type]
    name = _group_arg(node)
    group = name if isinstance(name, str) else None
    waits = [u for u in node.users if u.target is c10d.wait_tensor.default]
    source = node.args[0]
    if not isinstance(source, Node):  # coalesced: a list of tensors
        source = source[0]  # type: ignore[index]
    ranks = 0
    if op in (Op.ALL_GATHER, Op.REDUCE_SCATTER):
        ranks = int(node.args[1 if op is Op.ALL_GATHER else 2])  # type: ignore[call-overload]
    elif group is not None:
        ranks = compat.group_size(group)
    reduce_op = str(node.args[1]) if op in (Op.REDUCE_SCATTER, Op.ALL_REDUCE) else ""
    return Collective(op, node, waits[0] if len(waits) == 1 else None, source, group, ranks, reduce_op)  # type: ignore[arg-type]

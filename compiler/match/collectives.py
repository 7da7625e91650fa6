"""The collectives of a graph, in graph order, each with its wait and its group.

Every op that communicates is a collective here, also those of other libraries: torch's functional collectives, sends and
receives, symmetric memory, and custom ops whose schema takes a group. Kinds without a matcher have no `Op`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any

import torch
from torch.fx import Graph, Node

from ub_overlap import _torch_compat as compat
from ub_overlap.runtime.fp8.numerics import E4M3
from ub_overlap.runtime.session.host_layout import hosts_of

from ..graph.aten import c10d, dtype_of, tensor_of
from .widening_cast import WideningCast, find_widening_cast


class Op(Enum):
    """The kinds of collective that can be overlapped. An all_to_all has no fused form: it is split."""

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    ALL_TO_ALL = "all_to_all"


_OPS = {
    c10d.all_gather_into_tensor.default: Op.ALL_GATHER,
    c10d.reduce_scatter_tensor.default: Op.REDUCE_SCATTER,
    c10d.all_reduce.default: Op.ALL_REDUCE,
    c10d.all_to_all_single.default: Op.ALL_TO_ALL,
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
    widening: WideningCast | None = None
    """The casts to fp32 in front of a sum. A site may send what they read. None across hosts: c10d sums in what it sends."""
    hosts: int = 1
    """Hosts of the group's ranks."""

    @property
    def narrow_dtype(self) -> torch.dtype:
        """The type of the input before a widening cast."""
        return self.widening.dtype if self.widening else dtype_of(self.input)


_GROUP_ARGS = ("group_name", "pg_name", "process_group", "group")
"""Names of the argument that is a group, in the schemas of torch and of others."""
_GROUP_NAME_ENDS = ("group_name", "pg_name", "_group")
"""Ends of names of the same, such as "tp_group" and "ep_group_name"."""
_NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "c10d", "_dtensor", "symm_mem")
"""Libraries of torch whose ops with one of `_PEER_ARGS`, or with symmetric memory, communicate."""
_PEER_ARGS = ("tag", "peer", "signal")
"""Names of arguments of ops that send to, or wait for, one rank and take no group."""


def is_collective(node: Node) -> bool:
    """Return whether `node` communicates. Ops of this package do not count: they are sites already."""
    return node.op == "call_function" and isinstance(node.target, compat.OpOverload) and _communicates(node.target)


@cache
def _communicates(op: Any) -> bool:
    if op.namespace == "ub_overlap" or "wait_tensor" in op._schema.name:
        return False
    return _group_position(op) is not None or (op.namespace in _NAMESPACES and any(map(_is_of_peer, op._schema.arguments)))


def _is_of_peer(argument: Any) -> bool:
    return argument.name in _PEER_ARGS or "SymmetricMemory" in str(argument.type)


@cache
def _group_position(op: Any) -> int | None:
    """Return the position of the argument that is the group, None without one. Numbers, as in group_norm, name none."""
    return next((i for i, a in enumerate(op._schema.arguments) if _is_group(a)), None)


def _is_group(argument: Any) -> bool:
    kind = argument.type.getElementType() if isinstance(argument.type, torch.OptionalType) else argument.type
    if isinstance(kind, torch.StringType | torch.AnyType):
        return argument.name in _GROUP_ARGS or argument.name.endswith(_GROUP_NAME_ENDS)
    return "c10d.ProcessGroup" in str(kind)


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
    tensor, hosts = _first_input(node), _host_count(op, group)
    return Collective(
        op=op,
        node=node,
        wait=waits[0] if len(waits) == 1 else None,
        input=tensor,
        group=group,
        ranks=_rank_count(node, op, group),
        reduce_op=reduce_op,
        widening=find_widening_cast(tensor, node) if reduce_op in ("sum", "avg") and hosts == 1 else None,
        hosts=hosts,
    )


def read_again(c: Collective) -> Collective:
    """Return the record of a collective as the graph is now: another may have become its input, or its wait, since `c` was
    read. For passes that change a graph while they walk over it."""
    return read_collective(c.node)


def byte_dtype(c: Collective) -> torch.dtype:
    """Return the type in which a split collective sends: bytes, as which float8 is communicated, have no arithmetic and no cost
    of their own, so they are sent as float8."""
    return E4M3 if c.op in (Op.ALL_GATHER, Op.ALL_TO_ALL) and c.narrow_dtype is torch.uint8 else c.narrow_dtype


def _group_arg(node: Node) -> object:
    position = _group_position(node.target)
    if position is None:
        return None
    name = node.target._schema.arguments[position].name  # type: ignore[union-attr]
    return node.args[position] if position < len(node.args) else node.kwargs.get(name)


def _first_input(node: Node) -> Node:
    """Return the tensor that the collective reads, the first of several; the collective itself if it reads none."""
    return next((n for n in node.all_input_nodes if tensor_of(n) is not None), node)


def _host_count(op: Op | None, group: str | None) -> int:
    """Return the hosts of the collective's group; 1 where the group is unknown here."""
    if op is None or group is None:
        return 1
    return len(set(hosts_of(group)))


def _rank_count(node: Node, op: Op | None, group: str | None) -> int:
    """Return the ranks of the collective; 0 where the group is unknown here, as a library's own names may be."""
    if op in _RANKS_ARG:
        return int(node.args[_RANKS_ARG[op]])  # type: ignore[call-overload]
    if op is Op.ALL_TO_ALL:
        return len(node.args[1])  # type: ignore[arg-type]
    if group is None:
        return 0
    if op is not None:
        return compat.group_size(group)
    try:
        return compat.group_size(group)
    except (RuntimeError, ValueError, KeyError):
        return 0

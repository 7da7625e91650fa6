"""Writes of a traced graph: the matchers follow values, so a tensor must hold one value as long as it is read.

    x -> add_(x, y) -> z; x, z read later          becomes          x -> add(x, y) -> z; z read later

AOTAutograd functionalizes its graphs; make_fx does not. A last write to an input of the graph stays, as in AOTAutograd's.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate

from ub_overlap import _torch_compat as compat
from ub_overlap.runtime.errors import OptionError

from ..graph.aten import is_mutable, storage_node, tensor_of


def replace_writes(graph: Graph, where: str) -> int:
    """Replace in-place ops by those that return a new tensor. Return how many. OptionError for a write that cannot be."""
    count = 0
    for node in [n for n in graph.nodes if n.op == "call_function" and is_mutable(n)]:
        tensor, aliases = _written(node), _aliases(graph)
        if tensor is not None and _is_last_write(node, tensor, aliases):
            continue
        target = _functional(node) if tensor is not None else None
        if tensor is None or target is None or not _is_read_by_name(node, tensor, aliases):
            raise _refused(node, where)
        value = _value(node, target)
        before = tensor_of(tensor)
        if before is None or value is None or (value.shape, value.dtype) != (before.shape, before.dtype):
            raise _refused(node, where)
        with graph.inserting_before(node):
            result = graph.call_function(target, node.args, node.kwargs)
        result.meta = {**node.meta, "val": value}
        node.replace_all_uses_with(result)
        tensor.replace_all_uses_with(result, delete_user_cb=lambda user, at=result: at < user)
        graph.erase_node(node)
        count += 1
    return count


def _written(node: Node) -> Node | None:
    """Return the first argument of `node` if that is all it writes to."""
    writes = [i for i, a in enumerate(node.target._schema.arguments) if a.alias_info is not None and a.alias_info.is_write]  # type: ignore[union-attr]
    return node.args[0] if writes == [0] and node.args and isinstance(node.args[0], Node) else None


def _aliases(graph: Graph) -> dict[Node, list[Node]]:
    """Return the nodes of each memory, by the node that allocated it."""
    aliases: defaultdict[Node, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        aliases[storage_node(node)].append(node)
    return aliases


def _is_last_write(node: Node, tensor: Node, aliases: dict[Node, list[Node]]) -> bool:
    """Return whether `node` writes to an input of the graph that nothing computes with afterwards."""
    base = storage_node(tensor)
    if base.op != "placeholder":
        return False
    later = {user for alias in aliases[base] for user in alias.users if node < user}
    return all(user.op == "output" for user in later)


def _is_read_by_name(node: Node, tensor: Node, aliases: dict[Node, list[Node]]) -> bool:
    """Return whether all that reads the written memory afterwards reads it as `tensor`, or as the result of the write."""
    base = storage_node(tensor)
    others = [a for a in aliases[base] if a is not tensor and a < node]
    return base.op == "call_function" and not any(node < user for a in others for user in a.users)


def _functional(node: Node) -> Any:
    """Return the op that computes the same without writing; None if there is none."""
    target: Any = node.target
    packet = getattr(getattr(torch.ops, target.namespace), target._schema.name.partition("::")[2].removesuffix("_"), None)
    overload = getattr(packet, target._overloadname, None)
    if overload is None or overload is target or overload._schema.is_mutable:
        return None
    names = [[a.name for a in op._schema.arguments] for op in (overload, target)]
    return overload if names[0] == names[1] else None


def _value(node: Node, target: Any) -> torch.Tensor | None:
    args, kwargs = map_aggregate((node.args, node.kwargs), lambda a: a.meta["val"] if isinstance(a, Node) else a)  # type: ignore[misc]
    with compat.fake_mode_of(args[0]), torch.no_grad():
        value = target(*args, **kwargs)
    return value if isinstance(value, torch.Tensor) else None


def _refused(node: Node, where: str) -> OptionError:
    return OptionError(
        what="the graph writes to memory that is read afterwards, in a way that cannot be replaced",
        where=f"{where}: node {node.name}",
        got=str(node.target),
        expected="a graph without writes, or in-place ops whose tensor has no views that are read later",
        fix="trace make_fx(torch.func.functionalize(step))",
    )

"""Writes of a traced graph: the matchers follow values, so a tensor must hold one value as long as it is read.

    x -> add_(x, y) -> z; x, z read later        becomes     x -> add(x, y) -> z; z read later
    x -> v = x[0] -> copy_(v, y); x read later   becomes     x -> v = x[0] -> select_scatter(x, copy(v, y)) -> z; z read later

AOTAutograd functionalizes its graphs; make_fx does not. A last write to an input of the graph stays, as in AOTAutograd's.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate

from ub_overlap import _torch_compat as compat
from ub_overlap.runtime.errors import OptionError

from ..graph.aten import alias_base, aten, c10d, is_mutable, tensor_of, written_by
from ..graph.sizes import as_sizes, is_same

_SCATTERS: dict[Any, Any] = {aten.select.int: aten.select_scatter.default, aten.slice.Tensor: aten.slice_scatter.default}
"""Views through which a tensor may be written, and the ops that return the tensor with other elements there."""


class _NotReplaceable(Exception):
    """A write that no ops without writes can replace."""


def replace_writes(graph: Graph, where: str) -> int:
    """Replace in-place ops by those that return a new tensor. Return how many. OptionError for a write that cannot be."""
    count, aliases = 0, _Aliases()
    for node in list(graph.nodes):
        if node.op != "call_function" or not is_mutable(node):
            aliases.add(node)
            continue
        try:
            write = _Write(graph, node, aliases)
            if write.is_last:
                aliases.add(node)
                continue
            write.replace()
        except _NotReplaceable:
            raise _refused(node, where) from None
        count += 1
    return count


class _Aliases:
    """The nodes of each memory, of the part of a graph that was added."""

    def __init__(self) -> None:
        self._bases: dict[Node, Node] = {}
        self._nodes: dict[Node, list[Node]] = {}

    def add(self, node: Node) -> None:
        """Add a node behind those that it reads."""
        parent = alias_base(node)
        self._bases[node] = base = node if parent is None else self._bases[parent]
        self._nodes.setdefault(base, []).append(node)

    def base_of(self, node: Node) -> Node:
        """Return the node that allocated the memory of `node`."""
        return self._bases[node]

    def of(self, base: Node) -> list[Node]:
        """Return the nodes of the memory that `base` allocated."""
        return self._nodes[base]


class _Write:
    """A node that writes to its first argument and to nothing else."""

    def __init__(self, graph: Graph, node: Node, aliases: _Aliases) -> None:
        written = written_by(node)
        if isinstance(node.target, compat.HigherOrderOperator) or len(written) != 1 or written[0] is not node.args[0]:
            raise _NotReplaceable
        self._graph, self._node, self._aliases = graph, node, aliases
        self._tensor, self._base = written[0], aliases.base_of(written[0])
        later = {alias: [u for u in alias.users if node < u] for alias in aliases.of(self._base)}
        self._read = {alias for alias, users in later.items() if users}
        """What is read afterwards, by these names."""
        self._readers = [*node.users, *(user for users in later.values() for user in users)]

    @property
    def is_last(self) -> bool:
        """Whether it writes to an input of the graph that nothing computes with afterwards."""
        return self._base.op == "placeholder" and all(user.op == "output" for user in self._readers)

    def replace(self) -> None:
        """Replace the write. What reads the written memory afterwards reads new tensors."""
        node, target, views = self._node, _functional(self._node), self._views()
        if target is None or self._base.op != "call_function":
            raise _NotReplaceable
        with self._graph.inserting_before(node):
            new = self._like(self._tensor, target, node.args, node.kwargs)
            if node.target.namespace == c10d.name and (len(views) > 1 or new.target is not target):  # type: ignore[union-attr]
                raise _NotReplaceable  # the result is in flight, and nothing may read it before its wait
            for view, parent in pairwise(views):
                new = self._like(parent, _SCATTERS[view.target], (parent, new, *view.args[1:]), view.kwargs)
            self._pass_on(views.pop(), new)
            while views and (node.users or self._read.intersection(views)):
                view = views.pop()
                args = (new, *view.args[1:])
                new = self._add(view.target, args, view.kwargs, _value(view.target, args, view.kwargs))
                self._pass_on(view, new)
        node.replace_all_uses_with(new)
        self._graph.erase_node(node)

    def _views(self) -> list[Node]:
        """Return the written tensor and what it is a view of, as far as that is read. _NotReplaceable for other readers."""
        views, unread = [self._tensor], self._read - {self._tensor}
        while unread:
            parent = alias_base(views[-1])
            if parent is None or views[-1].target not in _SCATTERS:
                raise _NotReplaceable
            views.append(parent)
            unread.discard(parent)
        if views[-1] is not self._base and any(user.target is aten.as_strided.default for user in self._readers):
            raise _NotReplaceable  # as_strided may read elements of the base, which a new view lacks
        return views

    def _like(self, form: Node, target: Any, args: Any, kwargs: Any) -> Node:
        """Emit an op whose result has the sizes and strides of `form`: later views of it rely on them."""
        value, before = _value(target, args, kwargs), tensor_of(form)
        if value is None or before is None or (value.shape, value.dtype) != (before.shape, before.dtype):
            raise _NotReplaceable
        new = self._add(target, args, kwargs, value)
        if _has_same_strides(value, before):
            return new
        value = _value(aten.copy.default, (form, new), {})  # has the strides of its first argument
        if value is None or not _has_same_strides(value, before):
            raise _NotReplaceable
        return self._add(aten.copy.default, (form, new), {}, value)

    def _add(self, target: Any, args: Any, kwargs: Any, value: Any) -> Node:
        new = self._graph.call_function(target, args, kwargs)
        new.meta = {**self._node.meta, "val": value}
        self._aliases.add(new)
        return new

    def _pass_on(self, old: Node, new: Node) -> None:
        """Let the readers of `old` behind the write read `new`."""
        old.replace_all_uses_with(new, delete_user_cb=lambda user: self._node < user)


def _functional(node: Node) -> Any:
    """Return the op that computes the same without writing; None if there is none."""
    target: Any = node.target
    packet = getattr(getattr(torch.ops, target.namespace), target._schema.name.partition("::")[2].removesuffix("_"), None)
    overload = getattr(packet, target._overloadname, None)
    if overload is None or overload is target or overload._schema.is_mutable:
        return None
    names = [[a.name for a in op._schema.arguments] for op in (overload, target)]
    return overload if names[0] == names[1] else None


def _value(target: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
    fake_args, fake_kwargs = map_aggregate((args, kwargs), lambda a: a.meta["val"] if isinstance(a, Node) else a)  # type: ignore[misc]
    with compat.fake_mode_of(fake_args[0]), torch.no_grad():
        value = target(*fake_args, **fake_kwargs)
    return value if isinstance(value, torch.Tensor) else None


def _has_same_strides(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors of one shape have the same strides. That of a dim of size 1 means nothing."""
    sizes, strides = as_sizes(a.shape), zip(as_sizes(a.stride()), as_sizes(b.stride()), strict=True)
    return all(size == 1 or is_same(*pair) for size, pair in zip(sizes, strides, strict=True))


def _refused(node: Node, where: str) -> OptionError:
    return OptionError(
        what="the graph writes to memory that is read afterwards, in a way that cannot be replaced",
        where=f"{where}: node {node.name}",
        got=str(node.target),
        expected="in-place ATen ops on tensors whose views are not read later; slices and selects may be assigned to",
        fix="trace make_fx(torch.func.functionalize(step))",
    )

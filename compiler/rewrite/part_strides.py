"""Strides behind the parts of a packed result, which are slices where the graph was traced with contiguous tensors.

Views of a part get the strides that they have now; a view that strides do not allow becomes a reshape. A part is copied,
which restores all strides behind it, if one of these readers does not take what it would see:

    ATen ops               take any strides
    attention kernels      take rows at multiples of 16 bytes
    ops of this package    take matrices of any strides
    outputs                `Outputs`
    all others             (collectives, custom ops, higher-order ops, as_strided, writes) take what was traced

A part that is returned keeps the whole result alive. So it is copied where most of the result is not returned.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from ub_overlap import _aot_compat
from ub_overlap import _torch_compat as compat

from ..graph.aten import alias_base, aten, is_mutable

_RESHAPES = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}
_FIXED = {
    aten.as_strided.default,
    aten.set_.source_Tensor,
    aten._scaled_mm.default,
    aten.view.dtype,
    aten._reshape_alias.default,
}
"""ATen ops whose result or legality depends on the strides of their inputs."""
ALIGNMENT = 16
"""Bytes to which compiled code and attention kernels assume that tensors are aligned, whatever their offset is."""
_OPS = {
    f"ub_overlap::{name}" for name in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "bulk", "compare")
}


@dataclass(frozen=True, slots=True)
class Outputs:
    """The parts that a graph may return. Gradients and saved tensors may share memory; outputs of the user may not.

    autograd forbids to write to one of several views that a function returns, and AOTAutograd rebuilds aliases of an output
    from the strides and the offset that it was traced with.
    """

    saved: frozenset[int] = frozenset()
    """The positions of tensors that are saved for backward."""
    is_backward: bool = False
    restores_strides: bool = True
    """Inductor compiles the backward for the strides of saved tensors. AOTAutograd alone runs it as traced."""

    @classmethod
    def of(cls, graph: Graph, is_backward: bool, restores_strides: bool) -> Outputs:
        return cls(frozenset(_aot_compat.saved_outputs(graph.output_node())), is_backward, restores_strides)

    def may_return(self, output: Node, node: Node, value: torch.Tensor) -> bool:
        """Return whether `output` may return `node` as the view `value`."""
        positions = {i for i, returned in enumerate(output.args[0]) if returned is node}  # type: ignore[arg-type]
        if (not self.is_backward and not positions <= self.saved) or not _is_multiple(value.storage_offset(), value):
            return False
        return value.is_contiguous() or (self.restores_strides and not self.is_backward)


def update_strides(graph: Graph, parts: Sequence[Node], outputs: Outputs) -> None:
    """Correct the graph behind `parts`. `outputs`: what it may return."""
    known: dict[Any, tuple[Any, Any]] = {}
    kept = _find_returned(parts)
    for part in parts:
        views = _find_views(part, outputs, known, part in kept)
        if views is None:
            _copy(graph, part)
            continue
        for view, (target, value) in views.items():
            view.target, view.meta["val"] = target, value


def _find_returned(parts: Sequence[Node]) -> set[Node]:
    """Return the parts of results of which the graph returns half or more."""
    by_result: defaultdict[Node, list[Node]] = defaultdict(list)
    for part in parts:
        by_result[part.args[0]].append(part)  # type: ignore[index]
    kept: set[Node] = set()
    for siblings in by_result.values():
        returned = [part for part in siblings if _is_returned(part)]
        if 2 * sum(map(_cut_size, returned)) >= sum(map(_cut_size, siblings)):
            kept.update(returned)
    return kept


def _cut_size(part: Node) -> int:
    """Return the size of `part` along the dim in which it was cut."""
    _, _, begin, end = part.args
    assert isinstance(begin, int) and isinstance(end, int)
    return end - begin


def _is_returned(part: Node) -> bool:
    """Return whether the graph returns `part` or a view of it."""
    todo, seen = [part], {part}
    while todo:
        node = todo.pop()
        for user in node.users:
            if user.op == "output":
                return True
            if user not in seen and _is_view(user, node):
                seen.add(user)
                todo.append(user)
    return False


def _find_views(
    part: Node, outputs: Outputs, known: dict[Any, tuple[Any, Any]], may_return: bool
) -> dict[Node, tuple[Any, Any]] | None:
    """Return `part` and its views with the targets and values that they need. None if a reader takes no such view.

    `known`: those of equal views. Layers of a model have equal views, and a fake tensor takes long to compute.
    `may_return`: whether views may be returned at all.
    """
    views: dict[Node, tuple[Any, Any]] = {part: (part.target, part.meta["val"])}
    todo = [part]
    while todo:
        node = todo.pop()
        for user in node.users:
            if user.target is aten.sym_size.int or user in views:
                continue
            if _is_view(user, node):
                key = _key(user, views[node][1])
                view = known.get(key) or _compute(user, views)
                if view is None:
                    return None
                views[user] = view
                if key is not None:
                    known[key] = view
                todo.append(user)
            elif user.op == "output":
                if not may_return or not outputs.may_return(user, node, views[node][1]):
                    return None
            elif not _takes_strides(user, views[node][1]):
                return None
    return views


def _key(view: Node, value: Any) -> Any:
    """Return what the value of a view depends on; None where it has further inputs or symbolic sizes."""
    if len(view.all_input_nodes) != 1 or not isinstance(value, torch.Tensor):
        return None
    sizes = (*value.shape, *value.stride())
    if any(isinstance(size, torch.SymInt) for size in sizes):
        return None
    return view.target, repr(view.args[1:]), repr(view.kwargs), value.dim(), sizes, value.storage_offset(), value.dtype


def _compute(view: Node, views: dict[Node, tuple[Any, Any]]) -> tuple[Any, Any] | None:
    """Return the target and the value of a view: a reshape where strides do not allow a view. None if nothing does."""

    def value(arg: Any) -> Any:
        return (views[arg][1] if arg in views else arg.meta["val"]) if isinstance(arg, Node) else arg

    args, kwargs = torch.fx.node.map_aggregate((view.args, view.kwargs), value)  # type: ignore[misc]
    if view.target is operator.getitem:
        return view.target, args[0][args[1]]  # type: ignore[index]
    with compat.fake_mode_of(args[0]):
        try:
            return view.target, view.target(*args, **kwargs)  # type: ignore[operator]
        except (RuntimeError, ValueError):  # fake tensors refuse the view as real ones would
            if view.target not in _RESHAPES:  # view_as_complex, for example, takes even strides only
                return None
            return aten.reshape.default, aten.reshape.default(*args, **kwargs)


def _is_view(user: Node, node: Node) -> bool:
    """Return whether `user` is a view of `node`, or one of several views."""
    if user.target in _FIXED or user.target is torch.ops._c10d_functional.wait_tensor.default:
        return False
    return user.target in _RESHAPES or (alias_base(user) is node and not is_mutable(user))


def _takes_strides(user: Node, value: Any) -> bool:
    """Return whether `user`, no view, takes the strides of `value` where it was traced with a contiguous tensor."""
    if not isinstance(user.target, compat.OpOverload):
        return False
    if user.target in _FIXED or (is_mutable(user) and user.target is not aten.copy_.default):
        return False
    if "attention" in user.target._schema.name:
        return all(_is_multiple(size, value) for size in (value.storage_offset(), *value.stride()) if size != 1)
    return user.target.namespace in ("aten", "prims") or user.target._schema.name in _OPS


def _is_multiple(elements: Any, value: torch.Tensor) -> bool:
    """Return whether so many elements of `value` are known to be a multiple of the alignment."""
    return isinstance(elements, int) and elements * value.element_size() % ALIGNMENT == 0


def _copy(graph: Graph, part: Node) -> None:
    """Let all readers of `part` read a contiguous copy."""
    with graph.inserting_after(part):
        copy = graph.call_function(aten.clone.default, (part,), {"memory_format": torch.contiguous_format})
    copy.meta.update(part.meta)
    with compat.fake_mode_of(part.meta["val"]):
        copy.meta["val"] = part.meta["val"].clone(memory_format=torch.contiguous_format)
    part.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy and user.target is not aten.sym_size.int)

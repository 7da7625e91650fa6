"""Strides behind the parts of a packed result, which are slices where the graph was traced with contiguous tensors.

Views of a part get the strides that they have now; a view that strides do not allow becomes a reshape. A part is copied,
which restores all strides behind it, if one of these readers does not take what it would see:

    ATen ops               take any strides
    ops of this package    take matrices of any strides
    outputs                `Outputs`
    all others             (collectives, custom ops, higher-order ops, as_strided, writes) take what was traced
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from ub_overlap import _torch_compat as compat

from ..graph.aten import alias_base, aten

_RESHAPES = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}
_FIXED = {
    aten.as_strided.default,
    aten.set_.source_Tensor,
    aten._scaled_mm.default,
    aten.view.dtype,
    aten._reshape_alias.default,
}
"""ATen ops whose result or legality depends on the strides of their inputs."""
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
        return cls(frozenset(compat.saved_outputs(graph.output_node())), is_backward, restores_strides)

    def may_return(self, output: Node, node: Node, value: torch.Tensor) -> bool:
        """Return whether `output` may return `node` as the view `value`."""
        positions = {i for i, returned in enumerate(output.args[0]) if returned is node}  # type: ignore[arg-type]
        if not self.is_backward and not positions <= self.saved:
            return False
        return value.is_contiguous() or (self.restores_strides and not self.is_backward)


def update_strides(graph: Graph, parts: Sequence[Node], outputs: Outputs) -> None:
    """Correct the graph behind `parts`. `outputs`: what it may return."""
    known: dict[Any, tuple[Any, Any]] = {}
    for part in parts:
        views = _find_views(part, outputs, known)
        if views is None:
            _copy(graph, part)
            continue
        for view, (target, value) in views.items():
            view.target, view.meta["val"] = target, value


def _find_views(part: Node, outputs: Outputs, known: dict[Any, tuple[Any, Any]]) -> dict[Node, tuple[Any, Any]] | None:
    """Return `part` and its views with the targets and values that they need. None if a reader takes no such view.

    `known`: those of equal views. Layers of a model have equal views, and a fake tensor takes long to compute.
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
                views[user] = known.get(key) or _compute(user, views)
                if key is not None:
                    known[key] = views[user]
                todo.append(user)
            elif not (outputs.may_return(user, node, views[node][1]) if user.op == "output" else _takes_any_strides(user)):
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


def _compute(view: Node, views: dict[Node, tuple[Any, Any]]) -> tuple[Any, Any]:
    """Return the target and the value of a view: a reshape where strides do not allow a view."""

    def value(arg: Any) -> Any:
        return (views[arg][1] if arg in views else arg.meta["val"]) if isinstance(arg, Node) else arg

    args, kwargs = torch.fx.node.map_aggregate((view.args, view.kwargs), value)  # type: ignore[misc]
    if view.target is operator.getitem:
        return view.target, args[0][args[1]]
    with compat.fake_mode_of(args[0]):
        try:
            return view.target, view.target(*args, **kwargs)  # type: ignore[operator]
        except (RuntimeError, ValueError):  # fake tensors refuse the view as real ones would
            assert view.target in _RESHAPES, f"{view}: {view.target} of strides {args[0].stride()}"
            return aten.reshape.default, aten.reshape.default(*args, **kwargs)


def _is_view(user: Node, node: Node) -> bool:
    """Return whether `user` is a view of `node`, or one of several views."""
    if user.target in _FIXED or user.target is torch.ops._c10d_functional.wait_tensor.default:
        return False
    return user.target in _RESHAPES or (alias_base(user) is node and not _is_mutable(user))


def _takes_any_strides(user: Node) -> bool:
    if not isinstance(user.target, compat.OpOverload):
        return False
    if user.target in _FIXED or (_is_mutable(user) and user.target is not aten.copy_.default):
        return False
    return user.target.namespace in ("aten", "prims") or user.target._schema.name in _OPS


def _is_mutable(user: Node) -> bool:
    return bool(getattr(getattr(user.target, "_schema", None), "is_mutable", False))


def _copy(graph: Graph, part: Node) -> None:
    """Let all readers of `part` read a contiguous copy."""
    with graph.inserting_after(part):
        copy = graph.call_function(aten.clone.default, (part,), {"memory_format": torch.contiguous_format})
    copy.meta.update(part.meta)
    with compat.fake_mode_of(part.meta["val"]):
        copy.meta["val"] = part.meta["val"].clone(memory_format=torch.contiguous_format)
    part.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy and user.target is not aten.sym_size.int)

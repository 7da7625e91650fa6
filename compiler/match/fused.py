"""A collective of few tokens and what follows a reduction: the residual and the norm.

    all_reduce | reduce_scatter -> wait -> view* -> add(residual) -> norm
    all_gather -> wait

The sum with the residual may have any readers: it is a result of the op, as is the norm's result. The collective's own result
is none then, so another reader of it keeps the residual out. Inner values of the norm have no other readers.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.fx import Node

from ..graph.aten import Effect, aten, dtype_of, element_effect, readers, shape_of
from ..graph.sizes import divide, is_same, is_same_shape, numel
from ..plan.reasons import Reason
from .collectives import Collective, Op
from .norm import Norm, find_norm
from .site import Fused, Miss

_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_VECTOR = 16
"""Bytes that a thread moves at once."""
_MOST_ROW = 8 * 512 * _VECTOR
"""Bytes of a row that the op can norm (csrc/core/fused_collective.h)."""


def match_fused(c: Collective) -> Fused | Miss:
    """Return the fused form of a collective with a wait, or the reason why there is none."""
    assert c.wait is not None and c.op is not None
    dtype = dtype_of(c.input)
    if dtype not in _TYPES:
        return Miss(Reason.DTYPE_UNSUPPORTED, f"no fused collective of {dtype}")
    if c.reduce_op not in ("sum", "avg", ""):
        return Miss(Reason.REDUCE_OP_UNSUPPORTED, f"reduces with {c.reduce_op!r}; sum and avg are fused")
    if not _is_whole(_row_of(c), dtype):
        return Miss(Reason.LAYOUT, f"its rows are no multiple of {_VECTOR} bytes")
    alone = Fused(c)
    if c.op is Op.ALL_GATHER:
        return alone
    return _with_norm(_with_residual(alone))


def _row_of(c: Collective) -> object:
    """Return the elements of one row: of the part of one rank, where a vector is scattered."""
    shape = shape_of(c.input)
    if not shape:
        return 1
    return divide(shape[0], c.ranks) if c.op is Op.REDUCE_SCATTER and len(shape) == 1 else shape[-1]


def _is_whole(cols: object, dtype: torch.dtype) -> bool:
    return isinstance(cols, int) and cols * dtype.itemsize % _VECTOR == 0


def _with_residual(site: Fused) -> Fused:
    """Return the site with the sum that alone reads the result, if it is one with a tensor of the same sizes and type."""
    at, views = site.reduced, list[Node]()
    while len(readers(at)) == 1:
        (node,) = readers(at)
        effect = element_effect(node)
        if effect is not None and effect.kind is Effect.SAME and effect.source is at:
            views.append(node)
            at = node
            continue
        residual = _other_summand(node, at)
        return site if residual is None else replace(site, views=tuple(views), residual=residual, sum=node)
    return site


def _other_summand(node: Node, at: Node) -> Node | None:
    if node.target is not aten.add.Tensor or node.kwargs.get("alpha", 1) != 1 or len(node.args) != 2:
        return None
    others = [a for a in node.args if a is not at]
    if len(others) != 1 or not isinstance(others[0], Node) or dtype_of(others[0]) != dtype_of(at):
        return None
    same = is_same_shape(shape_of(others[0]), shape_of(node)) and is_same_shape(shape_of(at), shape_of(node))
    return others[0] if same else None


def _with_norm(site: Fused) -> Fused:
    """Return the site with the norm of its sum, or of its result through views."""
    if site.sum is not None:
        norm = find_norm(site.sum)
        return replace(site, norm=norm) if norm is not None and _fits(site, site.sum, norm) else site
    at, views = site.reduced, list[Node]()
    while True:
        norm = find_norm(at)
        if norm is not None and _fits(site, at, norm):
            inside = {*views, *norm.nodes}
            is_closed = all(reader in inside for view in views for reader in readers(view))
            return replace(site, norm=norm, views=tuple(views)) if is_closed else site
        following = [n for n in readers(at) if (e := element_effect(n)) is not None and e.kind is Effect.SAME]
        if len(following) != 1:
            return site
        at = following[0]
        views.append(at)


def _fits(site: Fused, normed: Node, norm: Norm) -> bool:
    """Return whether the rows of the collective are those of the norm."""
    cols, shape = shape_of(site.collective.input)[-1], shape_of(normed)
    same_rows = bool(shape) and is_same(cols, shape[-1]) and is_same(numel(shape), numel(shape_of(site.reduced)))
    bytes_of_row = cols * dtype_of(normed).itemsize
    return same_rows and isinstance(bytes_of_row, int) and bytes_of_row <= _MOST_ROW and norm.epsilon >= 0

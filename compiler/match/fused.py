"""A collective of few tokens and what follows a reduction: the residual, the norm, and the cast of the norm to float8.

    all_reduce | reduce_scatter -> wait -> branch (branch.py) -> add(residual) -> norm -> view* -> cast
    all_gather -> wait

The sum with the residual may have any readers: it is a result of the op, as is the norm's result. The collective's own result
is none then, so another reader of it keeps the residual out. Inner values of norm and cast have no other readers.

vLLM's RMSNorm.forward_native adds the residual in fp32, norms that sum, and returns it rounded:

    wait -> cast to fp32 -> add(residual) -> norm
                                 +-> cast back: the next residual
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.fx import Node

from ..graph.aten import CASTS, Effect, aten, dtype_of, element_effect, readers, shape_of
from ..graph.sizes import divide, is_same, is_same_shape
from ..plan.reasons import Reason
from .branch import Branch, find_branch, follow_views, has_rows_of
from .collectives import Collective, Op
from .float8_cast import Float8Cast, find_float8_cast
from .norm import Norm, find_norm
from .site import Fused, Miss

_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_VECTOR = 16
"""Bytes that a thread moves at once."""


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
    return fused_forms(c)[0]


def fused_forms(c: Collective) -> list[Fused]:
    """Return the forms of a collective that has one: with all that follows it, then with less, which other sites may have."""
    alone = Fused(c)
    if c.op is Op.ALL_GATHER:
        return [alone]
    summed = _with_residual(alone)
    both = _with_addend(summed)
    normed = _with_norm(both)
    unsummed = _with_norm(alone)
    return list(dict.fromkeys([_with_cast(normed), normed, both, summed, _with_cast(unsummed), unsummed, alone]))


def _row_of(c: Collective) -> object:
    """Return the elements of one row: of the part of one rank, where a vector is scattered."""
    shape = shape_of(c.input)
    if not shape:
        return 1
    return divide(shape[0], c.ranks) if c.op is Op.REDUCE_SCATTER and len(shape) == 1 else shape[-1]


def _is_whole(cols: object, dtype: torch.dtype) -> bool:
    return isinstance(cols, int) and cols * dtype.itemsize % _VECTOR == 0


def _with_residual(site: Fused) -> Fused:
    """Return the site with the sum of its branch and a tensor of the same sizes and type, if nothing else reads the branch."""
    return _add_residual(site, find_branch(site.collective, site.reduced)) or site


def _with_addend(site: Fused) -> Fused:
    """Return the site with the next sum too, where that alone reads the first: (branch + addend) + residual."""
    if site.branch is None or site.sum is None or site.norm is not None or len(readers(site.sum)) != 1:
        return site
    if not has_rows_of(site.collective, site.sum):
        return site
    at, views = follow_views(site.sum)
    branch = replace(site.branch, out=at, nodes=(*site.branch.nodes, site.sum, *views), addend=site.residual)
    return _add_residual(Fused(site.collective), branch) or site


def _add_residual(site: Fused, branch: Branch) -> Fused | None:
    at = branch.out
    if len(readers(at)) != 1:
        return None
    (node,) = readers(at)
    grown = replace(site, branch=branch)
    residual = _other_summand(node, at)
    if residual is not None and dtype_of(residual) == dtype_of(at):
        return replace(grown, residual=residual, sum=node)
    return _with_wide_sum(grown, at, node)


def _other_summand(node: Node, at: Node) -> Node | None:
    """Return the tensor that is added to `at`, of the same sizes."""
    if node.target is not aten.add.Tensor or node.kwargs.get("alpha", 1) != 1 or len(node.args) != 2:
        return None
    others = [a for a in node.args if a is not at]
    if len(others) != 1 or not isinstance(others[0], Node):
        return None
    same = is_same_shape(shape_of(others[0]), shape_of(node)) and is_same_shape(shape_of(at), shape_of(node))
    return others[0] if same else None


def _with_wide_sum(site: Fused, at: Node, cast: Node) -> Fused | None:
    """Return the site with a sum in fp32 of its branch `at`, which only `cast` reads, and a residual of its type.

    The sum is read by its norm, by a cast back, or by both.
    """
    dtype = dtype_of(at)
    if cast.target not in CASTS or dtype is torch.float32 or dtype_of(cast) is not torch.float32 or len(readers(cast)) != 1:
        return None
    (total,) = readers(cast)
    other = _other_summand(total, cast)
    if other is None:
        return None
    residual, inner = other, [cast, total]
    if dtype_of(other) is torch.float32 and other.target in CASTS:
        residual = other.all_input_nodes[0]
        inner += [other] if len(readers(other)) == 1 else []
    if dtype_of(residual) != dtype:
        return None
    back = [n for n in readers(total) if _is_cast_of(n, total, dtype)]
    others = [n for n in readers(total) if n not in back]
    if len(back) > 1:
        return None
    summed = replace(site, inner=tuple(inner), residual=residual, sum=back[0] if back else None)
    if not others:
        return summed
    norm = find_norm(at, total)
    if norm is None or not {*others} <= {*norm.nodes} or not _fits(summed, at, norm):
        return None
    return replace(summed, norm=norm, round_sum=False)


def _is_cast_of(node: Node, value: Node, dtype: torch.dtype) -> bool:
    """Return whether `node` is `value` in another type: a cast, or a copy in place, functionalized."""
    is_copy = node.target is aten.copy.default and node.args[1] is value and is_same_shape(shape_of(node), shape_of(value))
    return (node.target in CASTS or is_copy) and dtype_of(node) == dtype


def _with_norm(site: Fused) -> Fused:
    """Return the site with the norm of its sum, or of its result through views."""
    if site.norm is not None:
        return site
    if site.sum is not None:
        norm = find_norm(site.sum)
        return replace(site, norm=norm) if norm is not None and _fits(site, site.sum, norm) else site
    at, views = site.reduced, list[Node]()
    while True:
        norm = find_norm(at)
        if norm is not None and _fits(site, at, norm):
            inside = {*views, *norm.nodes}
            is_closed = all(reader in inside for view in views for reader in readers(view))
            return replace(site, norm=norm, inner=tuple(views)) if is_closed else site
        following = [n for n in readers(at) if (e := element_effect(n)) is not None and e.kind is Effect.SAME]
        if len(following) != 1:
            return site
        at = following[0]
        views.append(at)


def _fits(site: Fused, normed: Node, norm: Norm) -> bool:
    """Return whether the rows of the collective are those of the norm."""
    return has_rows_of(site.collective, normed) and norm.epsilon >= 0


def _with_cast(site: Fused) -> Fused:
    """Return the site with the cast of its norm to float8, through views of its rows; else with the reason why not."""
    if site.norm is None:
        return site
    at, views = site.norm.out, list[Node]()
    while True:
        cast = find_float8_cast(at)
        if isinstance(cast, Float8Cast):
            return replace(site, cast=cast, inner=(*site.inner, *views))
        following = readers(at)
        effect = element_effect(following[0]) if len(following) == 1 else None
        if cast or effect is None or effect.kind is not Effect.SAME:
            return replace(site, why_no_cast=cast)
        at = following[0]
        if not is_same(shape_of(at)[-1] if shape_of(at) else 1, shape_of(views[-1] if views else site.norm.out)[-1]):
            return site
        views.append(at)

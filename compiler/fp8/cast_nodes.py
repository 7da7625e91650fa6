"""Emit plain ATen nodes that quantize and dequantize, for Inductor to fuse into their neighbors.

    scale = max(amax(|x|) / F, LEAST_SCALE)   F: the format's largest value; one scale, or one for each line along `dim`
    q     = cast(clamp(x / scale, -F, F))     q * scale is about x

An infinity makes its scale infinite and its own element NaN. A NaN makes both NaN. So neither is lost.

The amax of a tensor is the maximum of its rows' amaxes. Inductor computes those in the kernel that computes the rows, a norm
for example, and there casts too where the scale is known before (delayed scaling).
"""

from __future__ import annotations

import math

import torch
from torch.fx import Node

from ub_overlap import _torch_compat as compat
from ub_overlap.runtime.fp8.numerics import LEAST_SCALE

from ..graph.aten import CASTS, Effect, aten, c10d, dtype_of, element_effect
from ..graph.emitter import Emitter
from ..graph.joint_graph import FIRST_REGION, mark_recomputed
from ..graph.sizes import is_positive


def emit_scale(e: Emitter, x: Node, format: torch.dtype, dim: int | None, groups: tuple[str, ...]) -> Node:
    """Emit the scale of `x` in float32: [] for dim None, else x's shape with `dim` of size 1.

    `groups`: the process groups whose ranks share the scale.
    """
    absolute = e.call(aten.abs.default, x)
    amax = emit_amax(e, absolute) if dim is None else e.call(aten.amax.default, absolute, [dim], True)
    amax = e.cast(amax, torch.float32)
    return emit_scale_of_amax(e, emit_max_over_ranks(e, amax, groups)[-1], format)


def emit_scale_of_amax(e: Emitter, amax: Node, format: torch.dtype) -> Node:
    """Emit the scale by which `amax` becomes the largest value of `format`."""
    scaled = e.call(aten.mul.Tensor, amax, 1.0 / torch.finfo(format).max)
    return e.call(aten.clamp_min.default, scaled, LEAST_SCALE)


def emit_amax(e: Emitter, absolute: Node) -> Node:
    """Emit the maximum [] of `absolute`, which has no negative elements: first of each row. 0 if there are no elements."""
    if not all(is_positive(n) for n in absolute.meta["val"].shape):  # amax of no elements raises
        absolute = e.call(aten.constant_pad_nd.default, e.call(aten.reshape.default, absolute, [-1]), [0, 1])
    if absolute.meta["val"].dim() > 1:
        absolute = e.call(aten.amax.default, absolute, [-1])
    return e.call(aten.amax.default, absolute, [])


def emit_finite_amax(e: Emitter, x: Node) -> Node:
    """Emit the largest finite absolute value of `x`, float32 []; 0 if there is none."""
    absolute = e.call(aten.abs.default, x)
    finite = e.call(aten.where.ScalarOther, e.call(aten.lt.Scalar, absolute, math.inf), absolute, 0.0)
    return e.cast(emit_amax(e, finite), torch.float32)


def emit_max_over_ranks(e: Emitter, value: Node, groups: tuple[str, ...]) -> list[Node]:
    """Return `value` and the all_reduces and waits after it. The last node is the maximum over the ranks of `groups`."""
    nodes = [value]
    for group in groups:
        nodes.append(e.call(c10d.all_reduce.default, nodes[-1], "max", group))
        nodes.append(e.call(c10d.wait_tensor.default, nodes[-1]))
    return nodes


def emit_quantize(e: Emitter, x: Node, scale: Node, format: torch.dtype) -> Node:
    """Emit `x / scale`, clamped to the range of `format` and cast to it."""
    return e.cast(_emit_scaled(e, x, scale, format), format)


def emit_quantize_by_finite_scale(e: Emitter, x: Node, scale: Node, format: torch.dtype) -> Node:
    """Emit the same for a scale that an infinity in `x` did not make infinite. Elements that are not finite become NaN."""
    is_finite = e.call(aten.lt.Scalar, e.call(aten.abs.default, x), math.inf)
    return e.cast(e.call(aten.where.ScalarOther, is_finite, _emit_scaled(e, x, scale, format), math.nan), format)


def _emit_scaled(e: Emitter, x: Node, scale: Node, format: torch.dtype) -> Node:
    wide = e.call(aten.mul.Tensor, e.cast(x, torch.float32), e.call(aten.reciprocal.default, scale))
    largest = torch.finfo(format).max
    return e.call(aten.clamp_max.default, e.call(aten.clamp_min.default, wide, -largest), largest)


def emit_dequantize(e: Emitter, q: Node, scale: Node, dtype: torch.dtype) -> Node:
    """Emit `q * scale` as `dtype`. Backward recomputes it."""
    wide = e.cast(q, torch.float32)
    scaled = e.call(aten.mul.Tensor, wide, scale)
    value = e.cast(scaled, dtype)
    mark_recomputed((wide, scaled, value), FIRST_REGION)
    return value


def emit_transposed_copy(e: Emitter, q: Node, may_fuse: bool = True, save: bool = False) -> Node:
    """Emit a contiguous [c, r] of `q` [r, c].

    `may_fuse`: whether Inductor may store it in the kernel that computes `q`. `save`: it is saved for backward; else
    backward recomputes it.
    """
    transposed = e.call(aten.permute.default, q, [1, 0])
    if may_fuse:
        copy = e.call(aten.clone.default, transposed, memory_format=torch.contiguous_format)
    else:
        copy = e.call(torch.ops.ub_overlap.fp8_layout_copy.default, transposed)
    if save:
        transposed.meta.pop("recompute", None)
        save_for_backward(copy)
    else:
        mark_recomputed((transposed, copy), FIRST_REGION)
    return copy


def emit_contiguous_copy(e: Emitter, q: Node) -> Node:
    """Emit a contiguous [r, c] of `q` [r, c]. Backward recomputes it."""
    copy = e.call(aten.clone.default, q, memory_format=torch.contiguous_format)
    mark_recomputed((copy,), FIRST_REGION)
    return copy


def view_as_bytes(e: Emitter, q: Node) -> Node:
    """Emit `q` viewed as uint8: gloo and some ops do not support float8."""
    return q if dtype_of(q) is torch.uint8 else e.call(aten.view.dtype, q, torch.uint8)


def view_as_format(e: Emitter, q: Node, format: torch.dtype) -> Node:
    """Emit the bytes `q` viewed as float8."""
    return e.call(aten.view.dtype, q, format)


def save_for_backward(node: Node) -> None:
    """Mark `node` to be saved, not recomputed, where backward needs it."""
    node.meta["recompute"] = compat.CheckpointPolicy.MUST_SAVE


def recompute_in_backward(node: Node) -> None:
    """Mark `node` to be computed again, not saved, where backward needs it."""
    node.meta["recompute"] = compat.CheckpointPolicy.MUST_RECOMPUTE


def is_cast(q: Node) -> bool:
    """Return whether `q` is a view of a cast: Inductor computes it. Else it is in memory: gathered, or an input."""
    return _viewed(q).target in CASTS


def is_saved(q: Node) -> bool:
    """Return whether the cast that `q` is a view of is saved for backward."""
    return _viewed(q).meta.get("recompute") is compat.CheckpointPolicy.MUST_SAVE


def _viewed(q: Node) -> Node:
    while (effect := element_effect(q)) is not None and effect.kind is not Effect.CAST:
        q = effect.source
    return q

"""Emit plain ATen nodes that quantize and dequantize, for Inductor to fuse into their neighbors.

    scale = max(amax(|x|) / F, LEAST_SCALE)   F: the format's largest value; one scale, or one for each line along `dim`
    q     = cast(clamp(x / scale, -F, F))     q * scale is about x

An infinity makes its scale infinite and its own element NaN. A NaN makes both NaN. So neither is lost.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from ub_overlap import _torch_compat as compat
from ub_overlap.runtime.fp8.numerics import LEAST_SCALE

from ..graph.aten import aten, c10d, dtype_of
from ..graph.emitter import Emitter
from ..graph.joint_graph import FIRST_REGION, mark_recomputed
from ..graph.sizes import is_positive


def emit_scale(e: Emitter, x: Node, format: torch.dtype, dim: int | None, groups: tuple[str, ...]) -> Node:
    """Emit the scale of `x` in float32: [] for dim None, else x's shape with `dim` of size 1.

    `groups`: the process groups whose ranks share the scale.
    """
    absolute = e.call(aten.abs.default, x)
    if dim is None and not all(is_positive(n) for n in x.meta["val"].shape):  # amax of no elements raises; here it is 0
        absolute = e.call(aten.constant_pad_nd.default, e.call(aten.reshape.default, absolute, [-1]), [0, 1])
    amax = e.call(aten.amax.default, absolute, [] if dim is None else [dim], dim is not None)
    amax = e.cast(amax, torch.float32)
    amax = emit_max_over_ranks(e, amax, groups)[-1]
    scaled = e.call(aten.mul.Tensor, amax, 1.0 / torch.finfo(format).max)
    return e.call(aten.clamp_min.default, scaled, LEAST_SCALE)


def emit_max_over_ranks(e: Emitter, value: Node, groups: tuple[str, ...]) -> list[Node]:
    """Return `value` and the all_reduces and waits after it. The last node is the maximum over the ranks of `groups`."""
    nodes = [value]
    for group in groups:
        nodes.append(e.call(c10d.all_reduce.default, nodes[-1], "max", group))
        nodes.append(e.call(c10d.wait_tensor.default, nodes[-1]))
    return nodes


def emit_quantize(e: Emitter, x: Node, scale: Node, format: torch.dtype) -> Node:
    """Emit `x / scale`, clamped to the range of `format` and cast to it."""
    wide = e.call(aten.mul.Tensor, e.cast(x, torch.float32), e.call(aten.reciprocal.default, scale))
    largest = torch.finfo(format).max
    clamped = e.call(aten.clamp_max.default, e.call(aten.clamp_min.default, wide, -largest), largest)
    return e.cast(clamped, format)


def emit_dequantize(e: Emitter, q: Node, scale: Node, dtype: torch.dtype) -> Node:
    """Emit `q * scale` as `dtype`. Backward recomputes it."""
    wide = e.cast(q, torch.float32)
    scaled = e.call(aten.mul.Tensor, wide, scale)
    value = e.cast(scaled, dtype)
    mark_recomputed((wide, scaled, value), FIRST_REGION)
    return value


def emit_transposed_copy(e: Emitter, q: Node) -> Node:
    """Emit a contiguous [c, r] of `q` [r, c]. Backward recomputes it."""
    transposed = e.call(aten.permute.default, q, [1, 0])
    copy = e.call(aten.clone.default, transposed, memory_format=torch.contiguous_format)
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
    node.meta["recompute"] = compat.must_save()

"""Plain ATen nodes that quantise and dequantise, for Inductor to fuse into their neighbours.

    scale = max(amax(|x|) / F, LEAST_SCALE)        F the format's largest value; a scale for the tensor, or for each line along `dim`
    q     = cast(clamp(x / scale, -F, F))   q * scale is about x

An infinity makes its scale infinite and itself NaN, a NaN both, so that neither is lost.
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


def scale_of(e: Emitter, x: Node, format: torch.dtype, dim: int | None, groups: tuple[str, ...]) -> Node:
    """float32 [] for dim None, else x's shape with `dim` of size 1. `groups`: whose ranks must have the same one."""
    magnitude = e.call(aten.abs.default, x)
    if dim is None and not all(
        is_positive(n) for n in x.meta["val"].shape
    ):  # the largest of none is 0, which amax does not say
        magnitude = e.call(aten.constant_pad_nd.default, e.call(aten.reshape.default, magnitude, [-1]), [0, 1])
    amax = e.call(aten.amax.default, magnitude, [] if dim is None else [dim], dim is not None)
    amax = e.cast(amax, torch.float32)
    amax = over_ranks(e, amax, groups)[-1]
    return e.call(aten.clamp_min.default, e.call(aten.mul.Tensor, amax, 1.0 / torch.finfo(format).max), LEAST_SCALE)


def over_ranks(e: Emitter, value: Node, groups: tuple[str, ...]) -> list[Node]:
    """`value` and every node behind it; the last is its largest over the ranks of `groups`."""
    nodes = [value]
    for group in groups:
        nodes.append(e.call(c10d.all_reduce.default, nodes[-1], "max", group))
        nodes.append(e.call(c10d.wait_tensor.default, nodes[-1]))
    return nodes


def cast_down(e: Emitter, x: Node, scale: Node, format: torch.dtype) -> Node:
    """x as `format`, in units of `scale`."""
    wide = e.call(aten.mul.Tensor, e.cast(x, torch.float32), e.call(aten.reciprocal.default, scale))
    largest = torch.finfo(format).max
    bounded = e.call(aten.clamp_max.default, e.call(aten.clamp_min.default, wide, -largest), largest)
    return e.cast(bounded, format)


def cast_up(e: Emitter, q: Node, scale: Node, dtype: torch.dtype) -> Node:
    """q * scale as `dtype`; computed again in backward rather than kept."""
    wide = e.cast(q, torch.float32)
    scaled = e.call(aten.mul.Tensor, wide, scale)
    value = e.cast(scaled, dtype)
    mark_recomputed((wide, scaled, value), FIRST_REGION)
    return value


def transposed_copy(e: Emitter, q: Node) -> Node:
    """[r, c] -> [c, r], contiguous."""
    turned = e.call(aten.permute.default, q, [1, 0])
    copy = e.call(aten.clone.default, turned, memory_format=torch.contiguous_format)
    mark_recomputed((turned, copy), FIRST_REGION)
    return copy


def row_copy(e: Emitter, q: Node) -> Node:
    """[r, c], contiguous."""
    copy = e.call(aten.clone.default, q, memory_format=torch.contiguous_format)
    mark_recomputed((copy,), FIRST_REGION)
    return copy


def as_bytes(e: Emitter, q: Node) -> Node:
    return q if dtype_of(q) is torch.uint8 else e.call(aten.view.dtype, q, torch.uint8)


def from_bytes(e: Emitter, q: Node, format: torch.dtype) -> Node:
    return e.call(aten.view.dtype, q, format)


def keep(node: Node) -> None:
    """Where backward needs `node`, it is kept."""
    node.meta["recompute"] = compat.must_save()

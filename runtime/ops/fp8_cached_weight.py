"""fp8_cached_weight: return the float8 cast of a weight from the weight cache, up to date.

    fp8_cached_weight(Tensor weight, ScalarType round_to, int? axis, Tensor? after, bool reuse_forward, Tensor[] siblings)
        -> (Tensor q, Tensor scale)
    fp8_cached_weight_transposed(Tensor weight, ScalarType round_to, int? axis, Tensor q) -> Tensor
    fp8_cached_weight_copy(Tensor cached) -> Tensor

weight: [R, C], contiguous. q: e4m3 [R, C]. scale: float32 [] (axis None), [R, 1] (axis -1) or [1, C] (axis -2). Both belong to
the cache and must not be written to.
`round_to`: the 16-bit type to which float32 is rounded first. `after`: a tensor of backward that orders the op; not read.
`reuse_forward`: the call is in backward and its forward has used the cast. Then the forward's cast is returned unchecked, if
no other forward has used it since (csrc/core/forward_uses.h).
`siblings`: none, or weights [R_i, C] with this one among them. Their first casts are allocated next to each other in this
order, so that fp8_packed_casts needs no copy. Casts that exist stay where they are. Several siblings have axis -1.

fp8_cached_weight_transposed returns a contiguous [C, R] copy of the `q` that fp8_cached_weight has returned. The first call
allocates it. From then on every cast of the weight writes it too.

fp8_cached_weight_copy copies a cached tensor that a graph returns. No pass of Inductor removes the copy.

The kernel in Python serves the CPU. CUDA has one in C++ (csrc/bindings/ops/fp8_cached_weight.cpp), which calls
fp8_cached_weight_miss for a weight that it has not cached.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..fp8.weight_cache import cache
from ..fp8.weight_cache.weight_cast import FORMAT, allocate, refresh, scale_shape, transpose
from .definition import define_python_op

_ARGUMENTS, _RESULTS = "Tensor weight, ScalarType round_to, int? axis", "(Tensor q, Tensor scale)"


def fp8_cached_weight(
    weight: Tensor,
    round_to: torch.dtype,
    axis: int | None,
    after: Tensor | None,
    reuse_forward: bool,
    siblings: Sequence[Tensor],
) -> tuple[Tensor, Tensor]:
    """Return (q, scale)."""
    cached = cache.find(weight, round_to, axis) or cache.insert(weight, round_to, axis, siblings)
    with cached.lock:
        if not cached.forward_uses.can_reuse(reuse_forward):
            refresh(weight, round_to, axis, cached)
        cached.forward_uses.record(reuse_forward)
        return cached.q, cached.scale


def fp8_cached_weight_miss(
    weight: Tensor, round_to: torch.dtype, axis: int | None, reuse_forward: bool, siblings: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Return (q, scale) on CUDA of a weight that is not in the C++ cache yet."""
    if torch.cuda.is_current_stream_capturing():  # a copy made for the capture, or a first call: memory of that graph
        (cached,) = allocate([weight], axis)
        refresh(weight, round_to, axis, cached)
        return cached.q, cached.scale
    cache.insert(weight, round_to, axis, siblings)
    return torch.ops.ub_overlap.fp8_cached_weight.default(weight, round_to, axis, None, reuse_forward, list(siblings))


def fp8_cached_weight_transposed(weight: Tensor, round_to: torch.dtype, axis: int | None, q: Tensor) -> Tensor:
    """Return the transposed copy of `q`."""
    cached = cache.find(weight, round_to, axis)
    if cached is None or cached.q is not q:
        return transpose(q)
    with cached.lock:
        if cached.transposed is None:
            cached.transposed = transpose(q)
        return cached.transposed


def fp8_cached_weight_transposed_miss(weight: Tensor, round_to: torch.dtype, axis: int | None, q: Tensor) -> Tensor:
    """Return the copy on CUDA of a cast that has none in the C++ cache yet."""
    cache.insert_transposed(weight, round_to, axis)
    return torch.ops.ub_overlap.fp8_cached_weight_transposed.default(weight, round_to, axis, q)


def fp8_cached_weight_copy(cached: Tensor) -> Tensor:
    """Return a copy of a cached tensor."""
    return cached.clone()


def _fake(weight: Tensor, round_to: torch.dtype, axis: int | None, *others: Any) -> tuple[Tensor, Tensor]:
    scale = weight.new_empty(scale_shape(weight.shape, axis), dtype=torch.float32)
    return weight.new_empty(weight.shape, dtype=FORMAT), scale


def _fake_transposed(weight: Tensor, round_to: torch.dtype, axis: int | None, q: Tensor) -> Tensor:
    return q.new_empty(q.shape[::-1])


define_python_op(
    f"fp8_cached_weight({_ARGUMENTS}, Tensor? after, bool reuse_forward, Tensor[] siblings) -> {_RESULTS}",
    fp8_cached_weight,
    _fake,
)
define_python_op(
    f"fp8_cached_weight_miss({_ARGUMENTS}, bool reuse_forward, Tensor[] siblings) -> {_RESULTS}", fp8_cached_weight_miss, None
)
define_python_op(
    f"fp8_cached_weight_transposed({_ARGUMENTS}, Tensor q) -> Tensor", fp8_cached_weight_transposed, _fake_transposed
)
define_python_op(
    f"fp8_cached_weight_transposed_miss({_ARGUMENTS}, Tensor q) -> Tensor", fp8_cached_weight_transposed_miss, None
)
define_python_op("fp8_cached_weight_copy(Tensor cached) -> Tensor", fp8_cached_weight_copy, torch.clone)

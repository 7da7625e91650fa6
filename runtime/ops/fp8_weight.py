"""The op that graphs call for a weight in float8 (docs/ops.md): all of it for the CPU, and for CUDA what is rare."""

from __future__ import annotations

import torch
from torch import Tensor

from ..fp8.weight_cache import cache
from ..fp8.weight_cache.weight_cast import FORMAT, made, refresh, shape_of_scale

_LIBRARY = torch.library.Library("ub_overlap", "FRAGMENT")


def fp8_weight(
    weight: Tensor, through: torch.dtype, axis: int | None, after: Tensor | None, known: bool
) -> tuple[Tensor, Tensor]:
    """weight [R, C], contiguous -> (e4m3 [R, C], scale [], [R, 1] or [1, C]), both kept and not to be written to.

    `through`: the 16-bit type that float32 is rounded to first. `after`: a tensor of backward, where the op is there; it is not
    read. `known`: in backward, whose forward has looked at the weight; the result is what that cast if nothing else has looked
    since: between the two somebody may have swapped the weight's elements for a while."""
    cast = cache.find(weight, through, axis) or cache.add(weight, through, axis)
    with cast.lock:
        if not (known and cast.looks == 1):
            refresh(weight, through, axis, cast)
        cast.looks = 0 if known else cast.looks + 1
        return cast.q, cast.scale


def fp8_weight_other(weight: Tensor, through: torch.dtype, axis: int | None, known: bool) -> tuple[Tensor, Tensor]:
    """The same on CUDA, of a weight whose cast C++ does not keep yet (csrc/bindings/ops/weights.cpp)."""
    if torch.cuda.is_current_stream_capturing():  # a copy that was made for the capture, or a first call: the graph's memory
        cast = made(weight, axis)
        refresh(weight, through, axis, cast)
        return cast.q, cast.scale
    cache.add(weight, through, axis)
    return torch.ops.ub_overlap.fp8_weight.default(weight, through, axis, None, known)


def fp8_kept_copy(cache: Tensor) -> Tensor:
    """A copy that no pass takes for superfluous."""
    return cache.clone()


def _fake(weight: Tensor, through: torch.dtype, axis: int | None, after: Tensor | None, known: bool) -> tuple[Tensor, Tensor]:
    scale = weight.new_empty(shape_of_scale(weight, axis), dtype=torch.float32)
    return weight.new_empty(weight.shape, dtype=FORMAT), scale


_ARGUMENTS, _RESULTS = "Tensor weight, ScalarType through, int? axis", "(Tensor q, Tensor scale)"
_LIBRARY.define(f"fp8_weight({_ARGUMENTS}, Tensor? after, bool known) -> {_RESULTS}", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.impl("fp8_weight", fp8_weight, "CompositeExplicitAutograd")
_LIBRARY.define(f"fp8_weight_other({_ARGUMENTS}, bool known) -> {_RESULTS}")
_LIBRARY.impl("fp8_weight_other", fp8_weight_other, "CompositeExplicitAutograd")
_LIBRARY.define("fp8_kept_copy(Tensor kept) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.impl("fp8_kept_copy", fp8_kept_copy, "CompositeExplicitAutograd")
torch.library.register_fake("ub_overlap::fp8_kept_copy", torch.clone, lib=_LIBRARY)
torch.library.register_fake("ub_overlap::fp8_weight", _fake, lib=_LIBRARY)

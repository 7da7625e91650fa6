"""The op that graphs call for a weight in float8 (docs/ops.md): all of it for the CPU, and for CUDA what is rare."""

from __future__ import annotations

import torch
from torch import Tensor

from . import kept
from .cast import FORMAT, made, refresh

_LIBRARY = torch.library.Library("ub_overlap", "FRAGMENT")


def fp8_weight(
    weight: Tensor, through: torch.dtype, axis: int | None, after: Tensor | None, known: bool
) -> tuple[Tensor, Tensor]:
    """weight [R, C], contiguous -> (e4m3 [R, C], scale [], [R, 1] or [1, C]), both kept and not to be written to.

    `through`: the 16-bit type that float32 is rounded to first. `after`: a tensor of backward, where the op is there; it is not
    read. `known`: the forward has looked at the weight, and the result is what it cast."""
    return fp8_weight_other(weight, through, axis, known)


def fp8_weight_other(weight: Tensor, through: torch.dtype, axis: int | None, known: bool) -> tuple[Tensor, Tensor]:
    """The same. On CUDA for calls that C++ does not take (csrc/bindings/ops/weights.cpp): first ones, those on another stream
    than the one before, captured ones."""
    captured = weight.is_cuda and torch.cuda.is_current_stream_capturing()
    cast = kept.find(weight, through, axis)
    new = cast is None
    if cast is None:  # while a graph is recorded: a copy that was made for it, or a first call; memory of the graph
        cast = made(weight, axis) if captured else kept.add(weight, through, axis)
    if weight.is_cuda and not captured:
        kept.follow(cast, weight, through, axis)
    if new or not known:
        refresh(weight, through, axis, cast, captured)
    return cast.q, cast.scale


def _fake(weight: Tensor, through: torch.dtype, axis: int | None, after: Tensor | None, known: bool) -> tuple[Tensor, Tensor]:
    rows, cols = weight.shape
    shape = () if axis is None else (rows, 1) if axis == -1 else (1, cols)
    return weight.new_empty((rows, cols), dtype=FORMAT), weight.new_empty(shape, dtype=torch.float32)


_ARGUMENTS, _RESULTS = "Tensor weight, ScalarType through, int? axis", "(Tensor q, Tensor scale)"
_LIBRARY.define(f"fp8_weight({_ARGUMENTS}, Tensor? after, bool known) -> {_RESULTS}", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.impl("fp8_weight", fp8_weight, "CompositeExplicitAutograd")
_LIBRARY.define(f"fp8_weight_other({_ARGUMENTS}, bool known) -> {_RESULTS}")
_LIBRARY.impl("fp8_weight_other", fp8_weight_other, "CompositeExplicitAutograd")
torch.library.register_fake("ub_overlap::fp8_weight", _fake, lib=_LIBRARY)

"""The float8 recipes: formats, scaling granularity, and which matmuls stay in high precision.

| recipe       | granularity and source of scales        | forward | gradients | weight gradient                         |
|--------------|-----------------------------------------|---------|-----------|-----------------------------------------|
| `tensorwise` | per tensor, of the current values       | e4m3    | e5m2      | float8                                  |
| `delayed`    | per tensor, of the amax history         | e4m3    | e5m2      | float8                                  |
| `rowwise`    | per multiplied row, of current values   | e4m3    | e4m3      | high precision, of the dequantized rows |

With per-row scales gradients do not need e5m2's range and keep e4m3's third mantissa bit. A weight gradient sums over the
rows, so their scales cannot be factored out: it is computed in the model's dtype. Delayed scales come from the amax values
of the last calls (runtime/fp8/amax_history/), so one pass casts and measures a tensor. Weights always have current scales.

`delayed` is EXPERIMENTAL: faster than `tensorwise` as CUDA graphs, slower in eager steps of an 8B MLP
(docs/performance/float8_casts.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from ub_overlap.runtime.fp8.numerics import E4M3, E5M2

RecipeName = Literal["tensorwise", "delayed", "rowwise"]
RECIPES: tuple[RecipeName, ...] = ("tensorwise", "delayed", "rowwise")

NARROW = (torch.bfloat16, torch.float16)
"""Dtypes of the values that are quantized. A matmul in float32 is assumed to be intended."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """One row of the table above."""

    name: RecipeName
    per_row: bool
    """Whether each row has a scale of its own, instead of one scale per tensor."""
    gradient_format: torch.dtype
    fp8_weight_gradient: bool
    """Whether weight gradients are float8 matmuls."""
    delayed: bool = False
    """Whether scales of activations and gradients come from amax histories."""


_RECIPES = {
    "tensorwise": Recipe("tensorwise", per_row=False, gradient_format=E5M2, fp8_weight_gradient=True),
    "delayed": Recipe("delayed", per_row=False, gradient_format=E5M2, fp8_weight_gradient=True, delayed=True),
    "rowwise": Recipe("rowwise", per_row=True, gradient_format=E4M3, fp8_weight_gradient=False),
}


def recipe_of(name: RecipeName) -> Recipe:
    return _RECIPES[name]

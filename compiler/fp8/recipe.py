"""What a recipe says: formats, where scales lie, and which products stay in high precision.

| recipe       | a scale for                  | forward | gradients | weight gradient                          |
|--------------|------------------------------|---------|-----------|------------------------------------------|
| `tensorwise` | each tensor                  | e4m3    | e5m2      | float8                                   |
| `delayed`    | each tensor, of what it was  | e4m3    | e5m2      | float8                                   |
| `rowwise`    | each row that is multiplied  | e4m3    | e4m3      | high precision, of the dequantised rows  |

Rows have scales of their own, so their gradients do not need e5m2's range and keep e4m3's third bit. A weight gradient sums
over the rows, which a row's scale cannot follow: it is computed in the model's type. Delayed scales are made of what a tensor
was in its last calls (runtime/fp8/amax_history/), so that it is cast in the pass that measures it; weights have current ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from ub_overlap.runtime.fp8.numerics import E4M3, E5M2

RecipeName = Literal["tensorwise", "delayed", "rowwise"]
RECIPES: tuple[RecipeName, ...] = ("tensorwise", "delayed", "rowwise")

NARROW = (torch.bfloat16, torch.float16)
"""Types of the values that are quantised: what is written in float32 is meant so."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """`rows`: a scale a row, else one a tensor. `gradient`: the format of what comes from the tangents."""

    name: RecipeName
    rows: bool
    gradient: torch.dtype
    weight_gradient: bool
    """Are weight gradients float8 products?"""
    delayed: bool = False
    """Are activations and gradients scaled by what they were?"""


_RECIPES = {
    "tensorwise": Recipe("tensorwise", rows=False, gradient=E5M2, weight_gradient=True),
    "delayed": Recipe("delayed", rows=False, gradient=E5M2, weight_gradient=True, delayed=True),
    "rowwise": Recipe("rowwise", rows=True, gradient=E4M3, weight_gradient=False),
}


def recipe_of(name: RecipeName) -> Recipe:
    return _RECIPES[name]

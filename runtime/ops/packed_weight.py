"""packed_weight: several weights as one matrix: their own memory where they lie next to each other, else a copy.

    packed_weight(Tensor[] weights, str site) -> Tensor

weights: [N_i, K] of one dtype. The result is [sum of N_i, K]. `ub_overlap.pack` puts weights next to each other. Every call
looks at their addresses, so weights may move at any time; the first copy of a site is logged. The result must not be written
to, and not be returned by a graph.
C++ implements it (csrc/bindings/ops/packed_weight.cpp).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .definition import LIBRARY

LIBRARY.define("packed_weight(Tensor[] weights, str site) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


@torch.library.register_fake("ub_overlap::packed_weight", lib=LIBRARY)
def fake(weights: Sequence[Tensor], site: str) -> Tensor:
    """Return an empty result of the right sizes."""
    return weights[0].new_empty((sum(weight.shape[0] for weight in weights), weights[0].shape[1]))

"""packed_weight: several weights as one matrix: their own memory where they lie next to each other, else a copy.

    packed_weight(Tensor[] weights, str site) -> Tensor
    fp8_packed_casts(Tensor[] casts, Tensor[] scales, str site) -> (Tensor q, Tensor scale)

weights: [N_i, K] of one dtype. The result is [sum of N_i, K]. `ub_overlap.pack` puts weights next to each other. Every call
looks at their addresses, so weights may move at any time; the first copy of a site is logged. The result must not be written
to, and not be returned by a graph.

casts: float8 [N_i, K], scales: float32 [N_i, 1], as fp8_cached_weight returns them for siblings. The results are
[sum of N_i, K] and [sum of N_i, 1], under the same rules. The weight cache allocates casts of siblings next to each other.
They lie apart where another graph has cast one of the weights alone before, or where a first call is captured.
C++ implements both (csrc/bindings/ops/packed_weight.cpp).
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


LIBRARY.define(
    "fp8_packed_casts(Tensor[] casts, Tensor[] scales, str site) -> (Tensor q, Tensor scale)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


@torch.library.register_fake("ub_overlap::fp8_packed_casts", lib=LIBRARY)
def fake_casts(casts: Sequence[Tensor], scales: Sequence[Tensor], site: str) -> tuple[Tensor, Tensor]:
    """Return empty results of the right sizes."""
    return fake(casts, site), fake(scales, site)

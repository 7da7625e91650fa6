"""The largest allowed difference of a gradient from its reference, ||a - b|| / ||b||."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

GRADIENT = {torch.bfloat16: 4e-2, torch.float32: 1e-3}
FLOAT8 = 0.2
"""For linears in float8. An e5m2 element has a relative error of 0.047 (root mean square: steps of 1/4 to 1/8), an e4m3 element
half of that. The first weight's gradient of a block follows eight products of two operands each, forward and backward:
sqrt(8 * 2) * 0.047 = 0.19. A lost shard of R gives sqrt(1 / R): 0.35 at 8 ranks."""


def gradient_bound(dtype: torch.dtype, options: Mapping[str, Any]) -> float:
    """Return the bound for a variant of ours. `dtype`: of the model. `options`: of the backend."""
    return GRADIENT[dtype] if options.get("fp8", "off") == "off" else FLOAT8

"""Constants that every float8 cast shares: graph nodes (compiler/fp8), the runtime and our kernels (csrc/core/float8.h).

A format's largest value is `torch.finfo(format).max`: 448 for e4m3, 57344 for e5m2.
"""

from __future__ import annotations

import torch

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FLOAT8 = (E4M3, E5M2)
"""The float8 formats that casts produce and ops accept."""

LEAST_SCALE = 2.0**-120
"""The smallest scale: that of a tensor or row of zeros. Its reciprocal is finite."""

"""What all casts to float8 agree on, whoever makes them: nodes of a graph (compiler/fp8), the runtime, or our kernels."""

from __future__ import annotations

TINY = 2.0**-120
"""The least scale: that of a tensor or row of zeros. Its reciprocal is finite."""

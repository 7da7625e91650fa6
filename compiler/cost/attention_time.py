"""The time of an attention: its operations at the measured rate, or at an assumed share of the matmul rate."""

from __future__ import annotations

from .profile import Profile

SHARES = (0.55, 0.45)
"""Forward and backward: flash attention's rate relative to a large matmul, for torch's kernels on Hopper. Assumed."""


def attention_us(profile: Profile, dtype: str, operations: float, is_backward: bool) -> float:
    """Return the microseconds of an attention. `dtype`: of its operands, without "torch."."""
    rates, measured = profile.compute.tflops, profile.attention
    rate, share = rates.get(dtype, rates["bfloat16"]), SHARES[is_backward]
    if measured is not None:
        share = (measured.forward, measured.backward)[is_backward] / rates.get(measured.dtype, rates["bfloat16"])
    return operations / (rate * 1e6 * share)

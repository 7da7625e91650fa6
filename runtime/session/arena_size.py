"""Sizes of arena slots."""

from __future__ import annotations

SIZE_STEP = 1 << 16
_FIRST_SLOT_BYTES = 1 << 18


def round_slot_bytes(needed: int) -> int:
    """Return the bytes of a slot that holds `needed`: at most an eighth more, so slowly growing sizes rarely reallocate."""
    size = max(needed, _FIRST_SLOT_BYTES)
    step = max(SIZE_STEP, 1 << (size.bit_length() - 4))
    return -(-size // step) * step

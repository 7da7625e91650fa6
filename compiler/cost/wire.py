"""Bytes on the wire: what one rank sends in a collective, in the collective's type or as float8.

Legend: R ranks; a shard is one rank's share of the gathered, scattered or reduced tensor.
"""

from __future__ import annotations

FLOAT8 = "float8"
SEGMENT = 128
"""Columns of a row that share one scale on a float8 wire."""
SCALE_BYTES = 4


def bytes_on_wire(elements: float, itemsize: int, wire_dtype: str = "") -> float:
    """Return the bytes of `elements` on the wire: `itemsize` each, or 1 each and a float32 scale for each segment."""
    return elements * (1 + SCALE_BYTES / SEGMENT) if wire_dtype == FLOAT8 else elements * itemsize


def bytes_sent_by_rank(shard_bytes: float, ranks: int, reduced_shard_bytes: float = 0.0) -> float:
    """Return the bytes one rank sends: R - 1 shards, and in an all_reduce its reduced shard to R - 1 ranks."""
    return (shard_bytes + reduced_shard_bytes) * (ranks - 1)

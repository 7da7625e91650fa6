"""The time of the host to issue the kernels of one op, or a collective, and how many kernels an op has.

Measured with two H100s and torch 2.11, in Inductor's Python wrapper.
"""

from __future__ import annotations

from typing import Any

from ..graph.aten import aten

HOST_US = 10.0
"""To issue one kernel from Python. Measured: 8 for a launch alone, 25 with torch's profiler."""
INNER_HOST_US = 6.0
"""To issue one more kernel within an op. Measured with sorts: 148 for 22 kernels, with the profiler."""
COLLECTIVE_HOST_US = 80.0
"""To start a collective of c10d or of ours. Measured: 52 to 83, of which 46 are NCCL's."""
KERNELS: dict[Any, int] = {
    aten.sort.default: 22,
    aten.sort.stable: 22,
    aten.topk.default: 6,
    aten.repeat_interleave.Tensor: 6,
    aten.cumsum.default: 3,
}
"""Kernels of ops that have several. Counted in traces."""


def kernels_of(op: Any) -> int:
    """Return the number of kernels of an op that computes."""
    return KERNELS.get(op, 1)


def host_us(op: Any) -> float:
    """Return the microseconds of the host to issue an op that computes."""
    return HOST_US + INNER_HOST_US * (kernels_of(op) - 1)

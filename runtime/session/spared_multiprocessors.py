"""How many multiprocessors matmuls can leave to the collectives that NCCL runs (csrc/bindings/carveout.h has the reason)."""

from __future__ import annotations

import torch

from ub_overlap import _torch_compat as compat
from ub_overlap._c10d_compat import uses_nccl

LARGEST_SHARE = 4
"""Of a GPU's multiprocessors a fourth is left at most."""
_PERSISTENT = (9, 0)
"""The compute capability from which on matmuls are persistent kernels."""


def most_spared(group: str, device: str) -> int:
    """Return how many multiprocessors matmuls leave at most while a collective of `group` runs: 0 unless NCCL runs it."""
    if device != "cuda" or not uses_nccl(compat.group_of(group)) or torch.cuda.get_device_capability() < _PERSISTENT:
        return 0
    return int(torch.cuda.get_device_properties().multi_processor_count) // LARGEST_SHARE

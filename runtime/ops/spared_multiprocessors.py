"""Multiprocessors that matmuls leave to NCCL between start and finish of a collective that c10d runs.

On Hopper GPUs a large matmul is a persistent kernel: one block for each multiprocessor, which stays until the matmul ends.
NCCL's kernel then starts when the matmul ends, and where NCCL is there first, some blocks of the matmul run after the others.
So matmuls that are launched meanwhile get fewer blocks (setting `nccl_multiprocessors`). torch has one number for this in a
process (its carve-out). A number that the program has set stays.
"""

from __future__ import annotations

from ub_overlap import _torch_compat as compat

from .. import settings


class _Set:
    """The carve-out that was set here, 0 for none."""

    count = 0


def spare(is_open: bool) -> None:
    """Let matmuls leave multiprocessors to NCCL from now on, if a collective is open; else let them use all."""
    get, put = compat.__getattr__("get_carveout"), compat.__getattr__("set_carveout")
    if is_open and not _Set.count and get() is None:
        count = settings.current().nccl_multiprocessors
        if count:
            put(count)
            _Set.count = count
    elif not is_open and _Set.count:
        if get() == _Set.count:
            put(None)
        _Set.count = 0

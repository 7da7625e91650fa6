"""start_host_read and finish_host_read: the host reads small integer tensors in one copy, while the device computes.

    start_host_read(Tensor[] sources) -> Tensor             int64 [all elements] on the host, on its way
    finish_host_read(Tensor read, Tensor[] after) -> Tensor int64, once it is here

`item()` of a tensor on a GPU waits for all that was issued before, and the GPU has nothing to do until the host has read the
number and issued more. Between start and finish the host issues what needs no number. `after` is not read: what computes it is
issued before the host waits, in whatever order a compiler keeps nodes without such an edge.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .definition import define_python_op

_copied: dict[int, torch.cuda.Event] = {}
"""By address of the pinned memory: the end of the copy into it."""


def start_host_read(sources: Sequence[Tensor]) -> Tensor:
    """Begin to copy all elements of `sources`, which are on one device, to the host."""
    is_cuda = sources[0].is_cuda
    sizes = [source.numel() for source in sources]
    read = torch.empty(sum(sizes), dtype=torch.int64, pin_memory=is_cuda)
    for part, source in zip(read.split(sizes), sources, strict=True):
        part.copy_(source.reshape(-1), non_blocking=is_cuda)
    if is_cuda:
        _copied[read.data_ptr()] = end = torch.cuda.Event()
        end.record(torch.cuda.current_stream(sources[0].device))
    return read


def finish_host_read(read: Tensor, _after: Sequence[Tensor]) -> Tensor:
    """Wait for the copy that a start has begun, and return the numbers."""
    if end := _copied.pop(read.data_ptr(), None):
        end.synchronize()
    return read.clone()


def _fake_start(sources: Sequence[Tensor]) -> Tensor:
    return torch.empty(sum(source.numel() for source in sources), dtype=torch.int64, device="cpu")


def _fake_finish(read: Tensor, _after: Sequence[Tensor]) -> Tensor:
    return torch.empty_like(read)


define_python_op("start_host_read(Tensor[] sources) -> Tensor", start_host_read, _fake_start)
define_python_op("finish_host_read(Tensor read, Tensor[] after) -> Tensor", finish_host_read, _fake_finish)

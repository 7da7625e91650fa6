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

from ..errors import UbOverlapError
from .definition import define_python_op

_copied: dict[int, torch.cuda.Event | None] = {}
"""By address of the memory on the host: the end of the copy into it, None where it has ended."""
_TAGS = (torch.Tag.cudagraph_unsafe,)
"""A replay of a CUDA graph would not run the code that keeps the event."""


def start_host_read(sources: Sequence[Tensor]) -> Tensor:
    """Begin to copy all elements of `sources`, which are on one device, to the host."""
    joined = torch.cat([source.reshape(-1).to(torch.int64) for source in sources])
    if not joined.is_cuda:
        _copied[joined.data_ptr()] = None
        return joined
    read = torch.empty(joined.shape, dtype=torch.int64, pin_memory=True)
    read.copy_(joined, non_blocking=True)
    _copied[read.data_ptr()] = end = torch.cuda.Event()
    end.record(torch.cuda.current_stream(joined.device))
    return read


def finish_host_read(read: Tensor, _after: Sequence[Tensor]) -> Tensor:
    """Wait for the copy that a start has begun, and return the numbers. UbOverlapError without one."""
    if read.data_ptr() not in _copied:
        raise UbOverlapError(
            "finish_host_read got a tensor that no start_host_read has returned, or finished it before",
            where="ub_overlap::finish_host_read",
            got=f"{list(read.shape)} on {read.device}",
            expected="the result of start_host_read, once",
            fix="report this: the graph that calls it was changed, or captured in a CUDA graph",
        )
    if end := _copied.pop(read.data_ptr()):
        end.synchronize()
    return read.clone()


def _fake_start(sources: Sequence[Tensor]) -> Tensor:
    return torch.empty(sum(source.numel() for source in sources), dtype=torch.int64, device="cpu")


def _fake_finish(read: Tensor, _after: Sequence[Tensor]) -> Tensor:
    return torch.empty_like(read)


define_python_op("start_host_read(Tensor[] sources) -> Tensor", start_host_read, _fake_start, _TAGS)
define_python_op("finish_host_read(Tensor read, Tensor[] after) -> Tensor", finish_host_read, _fake_finish, _TAGS)

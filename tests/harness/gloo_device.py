"""One gloo device for all groups of a process.

torch gives each group a device of its own, with a thread that wakes up a hundred times a second as long as the group exists.
Tests make tens of groups in processes that live long, and some of torch's caches keep them alive: idle ranks took a whole core.

A group has one thread, as NCCL has one stream: its collectives run one after the other. With torch's two threads, ranks of
eager code alone (torch 2.13, no module of ours imported) crash in gloo with a corrupted heap, once in some hundred steps.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch.distributed import distributed_c10d

_TIMEOUT = timedelta(minutes=30)


def share_gloo_device() -> None:
    """Let all groups that this process makes from now on have one device."""
    original: Any = distributed_c10d.ProcessGroupGloo
    device = original.create_default_device()

    class SharedDeviceGloo(original):  # a class, because torch asks isinstance
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta = _TIMEOUT, **more: Any) -> None:
            """`more`: what torch 2.15 passes, as options of these names."""
            options = original._Options()
            options._devices, options._timeout, options._threads = [device], timeout, 1
            for name, value in more.items():
                setattr(options, name, value)
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = SharedDeviceGloo  # type: ignore[misc]

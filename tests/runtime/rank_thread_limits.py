"""Rank functions of test_thread_limits.py: a rank that can start no further thread."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import torch
import torch.distributed as dist

import ub_overlap
from tests.harness.limits import no_more_threads
from ub_overlap.runtime import settings

from .rank_failures import attempt

_COUNT = 6 << 20
"""Elements of a message of many pieces."""


def collective(rank: int, world: int) -> list[dict[str, Any]]:
    """Rank 0 starts more split collectives than its copy engine has threads. Return the errors of that, and of a later call."""
    settings.configure(step_timeout_s=30.0)
    shard = torch.ones(1000)

    def start() -> Any:
        return ub_overlap.all_gather(shard, async_op=True)

    def start_four() -> None:
        for handle in [start() for _ in range(4)]:
            handle.wait()

    for _ in range(3):
        start().wait()
    first = [start() for _ in range(4)]
    if rank == 1:
        time.sleep(2.0)  # its slots stay in use: the pushes of rank 0 wait, each in a thread of the copy engine
        return [attempt(lambda: [handle.wait() for handle in first] + [start_four()])]
    for handle in first:
        handle.wait()
    with no_more_threads():
        found = attempt(start_four)
    return [found, attempt(start_four)]


def message(rank: int, world: int) -> Any:
    """Rank 0 sends three messages, the first while it can start no thread. Return its error, or what the other received."""
    settings.configure(step_timeout_s=60.0)
    ub_overlap.initialize_point_to_point(None, 1 << 20)
    if rank == 0:
        tensors = [torch.full((_COUNT,), value) for value in (111.0, 222.0, 333.0)]
        with no_more_threads():
            refused = attempt(lambda: ub_overlap.isend(tensors[0], group_dst=1))
        for handle in [ub_overlap.isend(tensor, group_dst=1) for tensor in tensors[1:]]:
            handle.wait()
        dist.barrier()
        return refused
    received = []
    for _ in range(2):
        tensor = torch.zeros(_COUNT)
        ub_overlap.recv(tensor, group_src=0)
        received.append(tensor.unique().tolist())
    dist.barrier()
    return received


def request_of_the_store(rank: int, world: int) -> dict[str, Any]:
    """Rank 0 runs its first call while it can start no thread: its peers are not at fault."""
    settings.configure(init_timeout_s=30.0)
    with no_more_threads() if rank == 0 else contextlib.nullcontext():
        return attempt(lambda: ub_overlap.all_gather(torch.ones(8)))

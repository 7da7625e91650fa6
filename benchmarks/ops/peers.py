"""Copy-engine pushes between ranks for the columns "push" and B, and a barrier kernel for a common start.

In mirror mode the one other GPU takes the pushes to all peers, at distinct addresses.
B is the matmul concurrent with an independent push of the same bytes, on one side stream, with peers in rotated order. A second
stream, or all ranks pushing to the same peer, would halve the bandwidth. No overlapped op with this matmul can be faster.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ub_overlap import _torch_compat as compat
from ub_overlap.tools.rank_process import World


class PeerPushes:
    """Symmetric memory for pushes of up to `max_bytes` to each peer of a group of `ranks`. Collective."""

    def __init__(self, world: World, ranks: int, max_bytes: int) -> None:
        self.world, self.ranks = world, ranks
        self.memory = compat.symmetric_empty(max_bytes * ranks, world.device)
        self.handle: Any = compat.symmetric_rendezvous(self.memory, world.group)
        self.source = torch.empty(max_bytes, dtype=torch.uint8, device=world.device).random_(0, 255)
        self.side = torch.cuda.Stream(priority=-1)

    def together(self) -> None:
        """Enqueue a barrier of all ranks on the current stream."""
        self.handle.barrier(channel=0)

    def push(self, size: int) -> Callable[[], None]:
        """Return a call that sends `size` bytes to every peer, each rank to another peer at a time."""
        source = self.source[:size]
        targets = [
            self.handle.get_buffer(process, (size,), torch.uint8, storage_offset=place * size)
            for process, place in push_targets(self.world.rank, self.world.ranks, self.ranks)
        ]

        def call() -> None:
            for target in targets:
                target.copy_(source, non_blocking=True)

        return call

    def with_push(self, product: Callable[[], Any], size: int) -> Callable[[], Any]:
        """Return a call of `product` on the current stream with the push on the side stream."""
        push = self.push(size)

        def call() -> Any:
            current = torch.cuda.current_stream()
            self.side.wait_stream(current)
            with torch.cuda.stream(self.side):
                push()
            out = product()
            current.wait_stream(self.side)
            return out

        return call


def push_targets(rank: int, processes: int, ranks: int) -> list[tuple[int, int]]:
    """Return (process, place in its memory) of each push of a rank, in order.

    `processes` other than `ranks`: mirror mode, where the other one of two processes stands for all peers."""
    if processes == ranks:
        return [((rank - step) % ranks, rank) for step in range(1, ranks)]
    return [(1 - rank, place) for place in range(1, ranks)]

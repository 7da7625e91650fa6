"""Copy-engine pushes between ranks for the columns "push" and B, and a barrier kernel for a common start.

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
    """Symmetric memory for pushes of up to `max_bytes` to each peer. Collective."""

    def __init__(self, world: World, max_bytes: int) -> None:
        self.world = world
        self.memory = compat.symmetric_empty(max_bytes * world.ranks, world.device)
        self.handle: Any = compat.symmetric_rendezvous(self.memory, world.group)
        self.source = torch.empty(max_bytes, dtype=torch.uint8, device=world.device).random_(0, 255)
        self.side = torch.cuda.Stream(priority=-1)

    def together(self) -> None:
        """Enqueue a barrier of all ranks on the current stream."""
        self.handle.barrier(channel=0)

    def push(self, size: int) -> Callable[[], None]:
        """Return a call that sends `size` bytes to every peer, each rank to another peer at a time."""
        ranks, rank = self.world.ranks, self.world.rank
        order = [(rank - step) % ranks for step in range(1, ranks)]
        source = self.source[:size]
        targets = [self.handle.get_buffer(peer, (size,), torch.uint8, storage_offset=rank * size) for peer in order]

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

"""One message between two ranks, alone and concurrent with a matmul, over c10d and over channels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import ub_overlap
from ub_overlap.tools.rank_process import World

from ..timing import Clock

C10D, OURS = "c10d", "ours"


class Messages:
    """Rank 0 sends `size` bytes to rank 1, and rank 1 to rank 0 if `both`. Other ranks only multiply."""

    def __init__(self, world: World, transport: str, group: Any, size: int, both: bool) -> None:
        self.world, self.group = world, group
        self.out = torch.ones(size // 2, dtype=torch.bfloat16, device=world.device)
        self.into = torch.zeros_like(self.out)
        self.sends = world.rank == 0 or (both and world.rank == 1)
        self.receives = world.rank == 1 or (both and world.rank == 0)
        self.isend, self.irecv = (dist.isend, dist.irecv) if transport == C10D else (ub_overlap.isend, ub_overlap.irecv)
        self.requests: list[Any] = []

    def issue(self) -> None:
        """Issue the messages. The current stream does not wait for them."""
        peer = 1 - self.world.rank
        # Rank 0 sends first and rank 1 receives first: c10d's messages of one group are one queue.
        steps = [(self.sends, self.isend, self.out, "group_dst"), (self.receives, self.irecv, self.into, "group_src")]
        for wanted, call, tensor, name in steps if self.world.rank == 0 else reversed(steps):
            if wanted:
                self.requests.append(call(tensor, group=self.group, **{name: peer}))

    def wait(self) -> None:
        """Let the current stream wait for the messages."""
        for request in self.requests:
            request.wait()
        self.requests.clear()

    def alone(self) -> None:
        """Issue the messages and wait."""
        self.issue()
        self.wait()


def measure(world: World, size: int, both: bool, iters: int, warm: int) -> dict[str, Any]:
    """Return milliseconds: a matmul alone, the messages alone, both together, and the matmul while messages run.

    The matmul is repeated until it takes about as long as the messages at 300 GB/s. "matmul_during": a message three times as
    long is in flight for all of the matmuls, so their time shows what it takes from them.
    """
    groups = {transport: dist.new_group(list(range(world.ranks))) for transport in (C10D, OURS)}
    ub_overlap.initialize_point_to_point(groups[OURS], 3 * size, device=world.device)
    width = 4096 if world.cuda else 128
    a = torch.ones(width, width, dtype=torch.bfloat16, device=world.device)
    b, c = torch.ones_like(a), torch.ones_like(a)
    count = max(1, round(size / 300e9 / 0.2e-3)) if world.cuda else 1

    def matmuls() -> None:
        for _ in range(count):
            torch.mm(a, b, out=c)

    calls: dict[str, Callable[[], Any]] = {"matmul": matmuls}
    for transport, group in groups.items():
        one, long = Messages(world, transport, group, size, both), Messages(world, transport, group, 3 * size, both)

        def together(one: Messages = one) -> None:
            one.issue()
            matmuls()
            one.wait()

        def during(long: Messages = long) -> None:
            long.wait()  # those of the last round, which have ended
            long.issue()
            matmuls()

        one.alone()
        calls |= {f"{transport} message": one.alone, f"{transport} both": together, f"{transport} matmul_during": during}
    times, spreads = Clock(world).rounds(calls, iters, warm)
    row: dict[str, Any] = {
        "kind": "message",
        "bytes": size,
        "both_ways": both,
        "matmuls": count,
        "ms": times,
        "spread_ms": spreads,
    }
    for transport in groups:
        row[f"{transport} loss"] = times[f"{transport} matmul_during"] / times["matmul"] - 1
    return row

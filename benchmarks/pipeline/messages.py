"""One message between two ranks, alone and concurrent with a matmul, over c10d and over channels."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import ub_overlap
from ub_overlap.runtime.session import channels
from ub_overlap.tools.rank_process import World

from ..timing import Clock, Prepared

C10D, OURS = "c10d", "ours"


LONG_MS = 2.0
"""Milliseconds of matmuls whose loss is measured."""
LEAST_BYTES = 16 << 20
"""Of the messages that run meanwhile: smaller ones are limited by the host."""


class Messages:
    """Rank 0 sends `count` times `size` bytes to rank 1, and rank 1 to rank 0 if `both`. Other ranks only multiply."""

    def __init__(self, world: World, transport: str, group: Any, size: int, both: bool, count: int = 1) -> None:
        self.world, self.group, self.count = world, group, count
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
        for _ in range(self.count):
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
    """Return milliseconds: matmuls alone, the messages alone, both together, and matmuls while messages run.

    "matmul": as long as the messages at 300 GB/s. "long_matmul": LONG_MS. "matmul_during": the same while messages for 1.5
    times as long are in flight, which were issued before, so their time shows what messages take from them.
    """
    groups = {transport: dist.new_group(list(range(world.ranks))) for transport in (C10D, OURS)}
    long_size = max(size, LEAST_BYTES if world.cuda else size)
    ub_overlap.initialize_point_to_point(groups[OURS], long_size, device=world.device)
    width = 4096 if world.cuda else 128
    a = torch.ones(width, width, dtype=torch.bfloat16, device=world.device)
    b, c = torch.ones_like(a), torch.ones_like(a)
    count = max(1, round(size / 300e9 / 0.2e-3)) if world.cuda else 1
    long_count = max(count, round(LONG_MS / 0.2)) if world.cuda else 2
    messages = max(1, math.ceil(1.5 * long_count * 0.2e-3 * 300e9 / long_size)) if world.cuda else 2

    def matmuls(count: int = count) -> None:
        for _ in range(count):
            torch.mm(a, b, out=c)

    def long_matmuls() -> None:
        matmuls(long_count)

    calls: dict[str, Callable[[], Any]] = {"matmul": matmuls, "long_matmul": long_matmuls}
    for transport, group in groups.items():
        one = Messages(world, transport, group, size, both)
        long = Messages(world, transport, group, long_size, both, messages)

        def together(one: Messages = one) -> None:
            one.issue()
            matmuls()
            one.wait()

        def begin(long: Messages = long) -> None:
            long.wait()  # those of the last round, which have ended
            long.issue()

        one.alone()
        calls |= {f"{transport} message": one.alone, f"{transport} both": together}
        calls[f"{transport} matmul_during"] = Prepared(begin, long_matmuls)
    times, spreads = Clock(world).rounds(calls, iters, warm)
    row: dict[str, Any] = {
        "kind": "message",
        "bytes": size,
        "both_ways": both,
        "matmuls": count,
        "long_matmuls": long_count,
        "piece_bytes": channels.PIECE_BYTES,
        "ms": times,
        "spread_ms": spreads,
    }
    for transport in groups:
        row[f"{transport} loss"] = times[f"{transport} matmul_during"] / times["long_matmul"] - 1
    return row

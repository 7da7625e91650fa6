"""Time the traffic between ranks: pushes by the copy engine, alone and concurrent with a matmul, and plain collectives."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ub_overlap import _torch_compat as compat
from ub_overlap.compiler.plan.reasons import COLLECTIVES

from ..rank_process import World
from .world import Burst, ProgressLine

MIB = 1 << 20
PUSHES = tuple(int(x * MIB) for x in (0.0625, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 128, 256))
COLLECTIVE_SIZES = tuple(int(x * MIB) for x in (0.25, 1, 2, 4, 8, 16, 32, 64, 128, 256))
"""Bytes that a rank sends; twice as many in an all_reduce."""
FEW_COLLECTIVE_SIZES = tuple(int(x * MIB) for x in (0.25, 2, 8, 32, 64, 128))
"""Of a quick calibration. NCCL uses more channels from some size on, so large ones are not taken from their neighbors."""
CPU_COLLECTIVE_SIZES = (4096, 65536, MIB, 4 * MIB)


class PeerTraffic:
    """Symmetric memory of the ranks' GPUs and a copy stream. Collective."""

    def __init__(self, world: World, max_bytes: int) -> None:
        self.world, self.max_bytes = world, max_bytes
        default_group: Any = dist.group.WORLD
        self.memory = compat.symmetric_empty(max_bytes, world.device)
        self.handle: Any = compat.symmetric_rendezvous(self.memory, str(default_group.group_name))
        self.source = torch.empty(max_bytes, dtype=torch.uint8, device=world.device).random_(0, 255)
        self.side = torch.cuda.Stream(priority=-1)

    def together(self) -> None:
        """Enqueue a barrier of all ranks on the current stream."""
        self.handle.barrier(channel=0)

    def push(self, size: int, step: int) -> Callable[[], Any]:
        """Return a call that sends `size` bytes to the peer `step` ranks below. All ranks send concurrently."""
        peer = (self.world.rank - step) % self.world.ranks
        target, source = self.handle.get_buffer(peer, (size,), torch.uint8), self.source[:size]
        return lambda: target.copy_(source, non_blocking=True)

    def round(self, size: int) -> Callable[[], Any]:
        """Return a call that pushes once to each peer, in rotated order."""
        pushes = [self.push(size, step) for step in range(1, self.world.ranks)]

        def call() -> None:
            for push in pushes:
                push()

        return call


def pushes(world: World, burst: Burst, peers: PeerTraffic, progress: ProgressLine, quick: bool) -> list[list[float]]:
    """Return [bytes, microseconds] of one push in a sequence of them."""
    times = []
    sizes = [size for size in PUSHES[:: 2 if quick else 1] if size <= peers.max_bytes]
    others = world.ranks - 1
    for size in sizes:
        count = max(2, min(16, 64 * MIB // (size * others)))
        times.append(burst.us(peers.round(size), count, rounds=9, together=True) / others)
        progress.step("pushes", 2)
    return [[size, us] for size, us in zip(sizes, world.worst(times), strict=True)]


def flag(world: World, burst: Burst, peers: PeerTraffic) -> float:
    """Return the microseconds that an 8-byte flag after every push adds."""
    big, small = peers.push(MIB, 1), peers.push(8, 1)

    def both() -> None:
        big()
        small()

    without = [burst.us(big, 16, together=True) for _ in range(3)]
    with_flag = [burst.us(both, 16, together=True) for _ in range(3)]
    return world.worst([max(0.5, statistics.median(with_flag) - statistics.median(without))])[0]


def _large_matmul(world: World) -> Callable[[], Any]:
    """Return a call of a matmul of 8192 rows and columns."""
    left, right = (torch.randn(8192, 8192, device=world.device).to(torch.bfloat16) for _ in range(2))
    out = torch.empty(8192, 8192, device=world.device, dtype=torch.bfloat16)
    return lambda: torch.mm(left, right, out=out)


def concurrent_slowdown(
    world: World,
    burst: Burst,
    send: Callable[[], Any],
    side: torch.cuda.Stream,
    together: Callable[[], Any],
    progress: ProgressLine,
    matmul: Callable[[], Any] | None = None,
) -> tuple[float, float]:
    """Return (slow-down of a matmul concurrent with traffic, slow-down of traffic concurrent with matmuls), 0.03 for 3%.

    Isolated and concurrent runs alternate. `send`: enqueues traffic, on the stream `side`. `together`: enqueues a barrier.
    `matmul`: enqueues a matmul; None: a large one.
    """
    matmul = matmul or _large_matmul(world)
    begin, done, sent = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    current = torch.cuda.current_stream()

    def run(products: int, sends: int) -> tuple[float, float]:
        burst.load(2)
        together()
        begin.record()
        side.wait_event(begin)
        for _ in range(products):
            matmul()
        done.record()
        with torch.cuda.stream(side):
            for _ in range(sends):
                send()
            sent.record()
        current.wait_stream(side)
        torch.cuda.synchronize()
        return begin.elapsed_time(done), begin.elapsed_time(sent)

    burst.settle(0.2)
    product, sending = world.worst([run(2, 0)[0] / 2, run(0, 8)[1] / 8])
    many = max(4, int(3 * product / sending) + 2)  # traffic that outlasts two matmuls
    long = max(2, int(2 * 8 * sending / product) + 2)  # matmuls that outlast eight rounds of traffic
    alone: list[list[float]] = [[], []]
    both: list[list[float]] = [[], []]
    for turn in range(9):
        times = run(2, 0)[0], run(0, 8)[1], run(2, many)[0], run(long, 8)[1]
        if turn:
            for values, us in zip((alone[0], alone[1], both[0], both[1]), times, strict=True):
                values.append(us)
    progress.step("traffic concurrent with a matmul", 20)
    slowdowns = [statistics.median(b) / statistics.median(a) - 1 for a, b in zip(alone, both, strict=True)]
    # The median over ranks: the slow-down varies between ranks, and its maximum would be noise.
    matmul, push_slowdown = (statistics.median(values) for values in zip(*world.gather(slowdowns), strict=True))
    return max(0.0, matmul), max(0.0, push_slowdown)


def collective_sizes(world: World, quick: bool) -> tuple[int, ...]:
    """Return the bytes that a rank sends in the collectives that are timed."""
    if not world.cuda:
        return CPU_COLLECTIVE_SIZES[:: 2 if quick else 1]
    return FEW_COLLECTIVE_SIZES if quick else COLLECTIVE_SIZES


def collectives(world: World, burst: Burst, progress: ProgressLine, quick: bool) -> dict[str, list[list[float]]]:
    """Return curves of the plain collectives by bytes that a rank sends. An all_to_all has equal pieces."""
    dtype = torch.bfloat16 if world.cuda else torch.float32
    sizes = collective_sizes(world, quick)
    item, ranks = torch.empty(0, dtype=dtype).element_size(), world.ranks
    curves: dict[str, list[list[float]]] = {}
    for kind in COLLECTIVES:
        times, sent = [], []
        for size in sizes:
            # Shards start at multiples of 512 bytes, like a model's: unaligned shards are copied in smaller words.
            few = max(1, size // ((ranks - 1) * 512)) * 512 // item
            small = torch.ones(few, device=world.device, dtype=dtype)
            big = torch.ones(few * ranks, device=world.device, dtype=dtype)
            other = torch.ones_like(big) if kind == "all_to_all" else big
            calls: dict[str, Callable[[], Any]] = {
                "all_gather": lambda b=big, s=small: dist.all_gather_into_tensor(b, s),
                "reduce_scatter": lambda b=big, s=small: dist.reduce_scatter_tensor(s, b),
                "all_reduce": lambda b=big: dist.all_reduce(b),
                "all_to_all": lambda b=big, o=other: dist.all_to_all_single(o, b),
            }
            count = max(2, min(10, 32 * MIB // size)) if world.cuda else 2
            us = burst.us(calls[kind], count, rounds=9 if world.cuda else 15, together=True, warm=2, ahead=2)
            times.append(us)
            sent.append(few * item * (ranks - 1) * (2 if kind == "all_reduce" else 1))
            progress.step(kind, 2)
        curves[kind] = [[size, us] for size, us in zip(sent, world.worst(times), strict=True)]
    return curves

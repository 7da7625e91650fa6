"""A matmul whose result leaves shard by shard: cuBLAS in pieces against a kernel that counts its tiles.

The last shard stays. A copy engine takes each other one as soon as it is there: in pieces, behind the piece's matmul; from one
kernel, once the shard's tiles are all counted as stored (the copying stream waits for the count, without a kernel). As in
arrivals.py, the copies use pinned host memory and are of as many bytes as take the time of a real push. No graphs: the host
issues everything while the GPU spins.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from .arrivals import FIXED_US, HostLink
from .engines import Choice, RandomMatmul, describe, distinct, ranked
from .library import KernelLibrary
from .shapes import Shape
from .speed import BOUND

SPIN_CYCLES = 1_500_000
"""Of the GPU, 0.8 ms."""


class Departures:
    """The departures of a shape's shards."""

    def __init__(self, library: KernelLibrary, x: RandomMatmul, link: HostLink, rate: float) -> None:
        self.library, self.x = library, x
        shape = x.shape
        self.done = torch.zeros(shape.ranks, dtype=torch.int32, device="cuda")
        self.word = torch.zeros(1, dtype=torch.int32).pin_memory()
        self.side = torch.cuda.Stream()
        copy_us = FIXED_US + shape.shard_bytes / rate * 1e-3 - link.fixed_us
        size = min(shape.shard_bytes, max(4096, int(copy_us * link.rate * 1e3) // 4096 * 4096))
        whole = x.out.view(torch.uint8).view(-1)
        ends = [(shard + 1) * shape.shard_bytes for shard in range(shape.ranks - 1)]
        self.leaving = [whole[end - size : end] for end in ends]
        self.landed = [torch.empty(size, dtype=torch.uint8).pin_memory() for _ in ends]

    def _push(self, shard: int) -> None:
        self.library.copy(self.landed[shard], self.leaving[shard])
        self.library.copy(self.word, self.done[:1])

    def pieces(self, pushes: bool = True) -> None:
        here = torch.cuda.current_stream()
        self.side.wait_stream(here)
        for shard in range(self.x.shape.ranks):
            self.x.rows(shard, shard + 1)
            if pushes and shard + 1 < self.x.shape.ranks:
                self.side.wait_stream(here)
                with torch.cuda.stream(self.side):
                    self._push(shard)
        here.wait_stream(self.side)

    def tiles(self, choice: Choice) -> int | None:
        """Return the tiles of a shard, None where clusters reach over its edge."""
        shape, (tile, cluster) = self.x.shape, (choice[0].tile, choice[0].cluster)
        if choice[0].stream_k or shape.rows % (tile[0] * cluster[0]) or shape.n % (tile[1] * cluster[1]):
            return None
        return (shape.rows // tile[0]) * (shape.n // tile[1])

    def counted(self, choice: Choice, pushes: bool = True) -> Callable[[], None]:
        tiles = self.tiles(choice)
        assert tiles
        x = self.x

        def call() -> None:
            self.library.fill(self.done, 0)
            here = torch.cuda.current_stream()
            self.side.wait_stream(here)
            assert self.library.matmul(*choice, x.a, x.b, x.out, x.shape.ranks, done=self.done)
            with torch.cuda.stream(self.side):
                for shard in range(x.shape.ranks - 1 if pushes else 0):
                    self.library.wait_count(self.done[shard : shard + 1], tiles)
                    self._push(shard)
            here.wait_stream(self.side)

        return call

    def transfer(self) -> None:
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            for shard in range(self.x.shape.ranks - 1):
                self._push(shard)
        torch.cuda.current_stream().wait_stream(self.side)

    def _finish(self) -> None:
        """Await the GPU. A count that never comes would stop it for ever: after two seconds the host writes it. Raises then."""
        end = torch.cuda.Event()
        end.record()
        until = time.monotonic() + 2
        while not end.query() and time.monotonic() < until:
            time.sleep(1e-3)
        late = not end.query()
        if late:
            with torch.cuda.stream(torch.cuda.Stream()):
                self.library.fill(self.done, 0x7F)
        torch.cuda.synchronize()
        assert not late, f"{self.x.shape.name}: tiles are missing in {self.done.tolist()}"

    def check(self, call: Callable[[], None], expected: torch.Tensor, name: str) -> None:
        """Run with NaN everywhere; what has left must be the result. Raises AssertionError."""
        self.x.out.fill_(float("nan"))
        for landed in self.landed:
            landed.fill_(0xFF)
        call()
        self._finish()
        error = self.x.error(expected)
        assert error < BOUND, f"{name}, {self.x.shape.name}: relative error {error}"
        for shard, (landed, leaving) in enumerate(zip(self.landed, self.leaving, strict=True)):
            assert torch.equal(landed, leaving.cpu()), f"{name}, {self.x.shape.name}: shard {shard} left too early"


def alternating(bodies: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Return the median microseconds of each, called in random order behind a spin."""
    times: dict[str, list[float]] = {name: [] for name in bodies}
    order, chance = list(bodies), random.Random(1)
    for number in range(rounds + 3):
        chance.shuffle(order)
        for name in order:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(SPIN_CYCLES)
            begin.record()
            bodies[name]()
            end.record()
            end.synchronize()
            if number >= 3:
                times[name].append(1e3 * begin.elapsed_time(end))
    return {name: median(values) for name, values in times.items()}


def outward_link(library: KernelLibrary) -> HostLink:
    """Return what copies to pinned memory take, as this benchmark issues them."""
    source, flag = torch.zeros(16 << 20, dtype=torch.uint8, device="cuda"), torch.zeros(1, dtype=torch.int32, device="cuda")
    to, word = torch.empty(16 << 20, dtype=torch.uint8).pin_memory(), torch.zeros(1, dtype=torch.int32).pin_memory()

    def body(size: int) -> Callable[[], None]:
        def call() -> None:
            for _ in range(4):
                library.copy(to[:size], source[:size])
                library.copy(word, flag)

        return call

    few, many = 1 << 20, 16 << 20
    times = alternating({"few": body(few), "many": body(many)}, 15)
    slope = (times["many"] - times["few"]) / 4 / (many - few)
    return HostLink(times["few"] / 4 - slope * few, 1e-3 / slope)


def measure(shape: Shape, library: KernelLibrary, link: HostLink, rate: float, rounds: int) -> dict[str, Any]:
    """Return microseconds by variant."""
    x = RandomMatmul.random(shape)
    expected = x.expected()
    one = Departures(library, x, link, rate)
    found = [pair for pair in ranked(library, x, shape.ranks) if one.tiles(pair[1])]
    choices = list(distinct(found, 4))
    steps: dict[str, Callable[[], Any]] = {"pieces": one.pieces}
    steps |= {f"counted {describe(choice)}": one.counted(choice) for choice in choices}
    for name, step in steps.items():
        one.check(step, expected, name)
    del expected
    best = choices[0]
    steps |= {
        "whole": x.whole,
        "transfer": one.transfer,
        "all pieces": lambda: one.pieces(pushes=False),
        f"counted alone {describe(best)}": one.counted(best, pushes=False),
        f"not counted {describe(best)}": lambda: library.matmul(*best, x.a, x.b, x.out, shape.ranks),
    }
    return {"shape": vars(shape), "us": alternating(steps, rounds)}

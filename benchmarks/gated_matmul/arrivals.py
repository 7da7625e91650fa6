"""A matmul whose left operand arrives shard by shard: cuBLAS in pieces against a gated kernel.

Shard 0 is there. The others arrive one after another, as by NVLink: a copy engine copies from pinned host memory to the head of
the shard, and then the shard's flag. It copies as many bytes as take the time of a real push: FIXED_US and the whole shard at
`rate` GB/s. So an arrival has the right time, but writes fewer bytes to memory than a real one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .algorithms import Algorithms
from .clock import interleaved, quick_replay
from .engines import Choice, Quack, RandomMatmul, describe, distinct, ranked
from .library import KernelLibrary
from .shapes import Shape
from .speed import BOUND

SET = 0x01010101
FIXED_US = 8.0
"""Of a push with its flag, as measured between GPUs: 7 at TP 4, 8 to 11 at TP 8."""


@dataclass(frozen=True)
class HostLink:
    """Copies from pinned memory, each with its flag: fixed microseconds and GB/s."""

    fixed_us: float
    rate: float

    @classmethod
    def measure(cls, library: KernelLibrary) -> HostLink:
        to = torch.empty(16 << 20, dtype=torch.uint8, device="cuda")
        source = torch.randint(0, 255, (16 << 20,), dtype=torch.uint8).pin_memory()
        flag, word = torch.zeros(1, dtype=torch.int32, device="cuda"), torch.full((1,), SET, dtype=torch.int32).pin_memory()

        def body(size: int) -> Callable[[], None]:
            def call() -> None:
                for _ in range(4):
                    library.copy(to[:size], source[:size])
                    library.copy(flag, word)

            return call

        few, many = 1 << 20, 16 << 20
        times = interleaved({"few": body(few), "many": body(many)}, 15, 2)
        slope = (times["many"][0] - times["few"][0]) / 4 / (many - few)
        return cls(times["few"][0] / 4 - slope * few, 1e-3 / slope)


class Arrivals:
    """The arrivals of a shape's shards. Each shard has `parts` flags; only the last one arrives in as many pieces."""

    def __init__(self, library: KernelLibrary, x: RandomMatmul, link: HostLink, rate: float, parts: int = 1) -> None:
        self.library, self.x, self.parts = library, x, parts
        shape = x.shape
        self.flags = torch.zeros(shape.ranks * parts, dtype=torch.int32, device="cuda")
        self.side = torch.cuda.Stream()
        self.words = torch.full((parts,), SET, dtype=torch.int32).pin_memory()
        whole, last = x.a.view(torch.uint8).view(-1), (shape.ranks - 1) * parts
        part_bytes = shape.shard_bytes // parts
        self.landings: list[Tensor] = []
        self.landed: list[Tensor] = []
        for first, count in [(i, parts) for i in range(parts, last, parts)] + [(last + i, 1) for i in range(parts)]:
            copy_us = FIXED_US + count * part_bytes / rate * 1e-3 - link.fixed_us
            size = min(count * part_bytes, max(4096, int(copy_us * link.rate * 1e3) // 4096 * 4096))
            self.landings.append(whole[first * part_bytes : first * part_bytes + size])
            self.landed.append(self.flags[first : first + count])
        self.sources = [landing.cpu().pin_memory() for landing in self.landings]

    def step(self, work: Callable[[], object], arrive: bool = True) -> Callable[[], None]:
        """Return a call: flags are reset, shards arrive while `work` runs, both end. Not `arrive`: all are there."""

        def call() -> None:
            self.library.fill(self.flags, 0)
            self.library.fill(self.flags[: self.parts] if arrive else self.flags, 1)
            here = torch.cuda.current_stream()
            self.side.wait_stream(here)
            if arrive:
                with torch.cuda.stream(self.side):
                    for landing, source, landed in zip(self.landings, self.sources, self.landed, strict=True):
                        self.library.copy(landing, source)
                        self.library.copy(landed, self.words[: landed.numel()])
            work()
            here.wait_stream(self.side)

        return call

    def searched(self, piece: Callable[[int], None]) -> Callable[[], None]:
        """Return pieces of one shard, each behind a wait. `piece`: the matmul of a shard's rows from a given row on."""

        def call() -> None:
            for shard in range(self.x.shape.ranks):
                if shard:
                    self.library.wait(self.flags[shard : shard + 1])
                piece(shard * self.x.shape.rows)

        return call

    def pieces(self, group: int) -> Callable[[], None]:
        """Return cuBLAS in pieces of `group` shards, the own shard apart, each behind a wait for its last shard."""

        def call() -> None:
            x, ranks = self.x, self.x.shape.ranks
            x.rows(0, 1)
            for first in range(1, ranks, group):
                end = min(first + group, ranks)
                if end == ranks and self.parts > 1 and first + 1 == end:
                    self._cut(first)
                    continue
                self.library.wait(self.flags[end * self.parts - 1 : end * self.parts])
                x.rows(first, end)

        return call

    def _cut(self, shard: int) -> None:
        """cuBLAS on a shard that arrives in parts."""
        x = self.x
        size = x.shape.rows // self.parts
        for part in range(shard * self.parts, (shard + 1) * self.parts):
            self.library.wait(self.flags[part : part + 1])
            torch.mm(x.a[part * size : (part + 1) * size], x.b.t(), out=x.out[part * size : (part + 1) * size])

    def gated(self, choice: Choice) -> Callable[[], None]:
        """Return our kernel, gated part by part."""
        x = self.x

        def call() -> None:
            assert self.library.matmul(*choice, x.a, x.b, x.out, x.shape.ranks * self.parts, self.flags)

        return call

    def gated_but_last(self, choice: Choice, last: int = 1) -> Callable[[], None]:
        """Return our kernel on all shards but the `last`, and cuBLAS pieces on these."""
        x = self.x
        ranks = x.shape.ranks
        rows = x.shape.rows * (ranks - last)

        def call() -> None:
            assert self.library.matmul(*choice, x.a[:rows], x.b, x.out[:rows], (ranks - last) * self.parts, self.flags)
            for shard in range(ranks - last, ranks):
                self.library.wait(self.flags[(shard + 1) * self.parts - 1 : (shard + 1) * self.parts])
                x.rows(shard, shard + 1)

        return call

    def check(self, call: Callable[[], None], expected: Tensor, name: str) -> float:
        """Run a step with NaN where data arrives, and return the error. Raises AssertionError where a gate did not hold."""
        worst = 0.0
        for _ in range(2):
            for landing in self.landings:
                landing.fill_(0xFF)
            self.x.out.fill_(float("nan"))
            call()
            error = self.x.error(expected)
            assert error < BOUND, f"{name}, {self.x.shape.name}: relative error {error}"
            worst = max(worst, error)
        return worst


def _fastest(steps: dict[str, Callable[[], None]]) -> dict[str, Callable[[], None]]:
    """Return the steps, fastest first by short runs."""
    times = {name: quick_replay(step, 4) for name, step in steps.items()}
    return {name: steps[name] for name in sorted(steps, key=lambda name: times[name])}


def measure(
    shape: Shape,
    library: KernelLibrary,
    quack: Quack | None,
    algorithms: Algorithms,
    link: HostLink,
    rate: float,
    rounds: int,
) -> dict[str, Any]:
    """Return microseconds by variant."""
    x = RandomMatmul.random(shape)
    expected = x.expected()
    one, two = (Arrivals(library, x, link, rate, parts) for parts in (1, 2))
    steps: dict[str, Callable[[], None]] = {"pieces 1": one.step(one.pieces(1)), "pieces 2": one.step(one.pieces(2))}
    steps["pieces 1, searched"] = one.step(one.searched(algorithms.fastest(x, shape.rows)[1]))
    steps["pieces 1, last cut"] = two.step(two.pieces(1))
    choices = list(distinct(ranked(library, x, shape.ranks), 8))
    plain = _fastest({f"gated plain {describe(choice)}": one.step(one.gated(choice)) for choice in choices})
    best = choices[[f"gated plain {describe(choice)}" for choice in choices].index(next(iter(plain)))]
    steps |= dict(list(plain.items())[:2])
    cut_choices = distinct(ranked(library, x, 2 * shape.ranks), 4)
    cut = _fastest({f"gated, last cut {describe(choice)}": two.step(two.gated(choice)) for choice in cut_choices})
    but_last = _fastest({f"gated but last {describe(choice)}": one.step(one.gated_but_last(choice)) for choice in choices[:4]})
    steps |= dict([next(iter(cut.items())), next(iter(but_last.items()))])
    if quack:
        one.step(lambda: None, arrive=False)()
        others = {f"quack gated {name}": one.step(call) for _, name, call in quack.ranked(x, one.flags)[:4]}
        steps |= dict(list(_fastest(others).items())[:2])
    errors = [(two if "last cut" in name else one).check(call, expected, name) for name, call in steps.items()]
    del expected
    steps |= {
        "whole": x.whole,
        "whole framed": one.step(x.whole, arrive=False),
        "whole next to": one.step(x.whole),
        "all pieces": x.pieces,
        "transfer": one.step(lambda: None),
        "transfer, last cut": two.step(lambda: None),
        f"gate open {describe(best)}": one.step(one.gated(best), arrive=False),
    }
    times = interleaved(steps, rounds, 2)
    return {
        "shape": vars(shape),
        "link_us": (shape.ranks - 1) * shape.shard_bytes / rate * 1e-3,
        "copied_bytes": one.sources[0].nbytes,
        "us": {name: us for name, (us, _) in times.items()},
        "spread_us": {name: spread for name, (_, spread) in times.items()},
        "largest_error": max(errors),
        "late": int(library.late),
    }

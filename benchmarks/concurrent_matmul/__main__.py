"""Time a matmul between start and finish of a split collective, against the same matmul alone.

    torchrun --nproc-per-node N -m benchmarks.concurrent_matmul [--mib 32,128,512] [--matmul 8192,8192,8192] [--json OUT]

A row is a collective whose whole tensor has that many MiB of bf16; a rank sends (R - 1) / R of it. The clock stands around the
matmul alone: events in front of and behind it, in CUDA graphs too ("(g)"). The GPU spins for about a millisecond in front of
each call, until the host has issued all of it: no event waits for a launch. A collective that is shorter than the matmul slows
down a part of it only: compare rows whose collective takes about as long. Microseconds, median over --rounds, maximum over
ranks; all calls of a row alternate. Results, of replays too, are compared with c10d's before. CPU times mean nothing.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ub_overlap.runtime import ops
from ub_overlap.tools.rank_process import Deadline, World, capture_graph

from .. import facts
from ..ranks import begin, end
from ..timing import Call, Clock, settle
from .table import NAME, text

OPS = torch.ops.ub_overlap
COLLECTIVES = ("all_gather", "reduce_scatter", "all_to_all")
SPIN_CYCLES = 2_000_000
"""Of the GPU, about a millisecond: longer than the host needs for a call of start, matmul and finish."""


class Stopwatch:
    """The time between two points of a call, on the device. `captured`: both are in a CUDA graph."""

    def __init__(self, world: World, captured: bool = False) -> None:
        self._events = [torch.cuda.Event(enable_timing=True, external=captured) for _ in range(2)] if world.cuda else []
        self._seconds = [0.0, 0.0]

    def note(self, point: int) -> None:
        if self._events:
            self._events[point].record()
        self._seconds[point] = time.perf_counter()

    def ms(self) -> float:
        """Return the milliseconds of the last call. The device is idle."""
        if self._events:
            return self._events[0].elapsed_time(self._events[1])
        return 1e3 * (self._seconds[1] - self._seconds[0])


class StopwatchClock(Clock):
    """Times what lies between the points of a call: a pair of the call and its stopwatch."""

    def time_call(self, call: Any) -> float:
        run, watch = call
        self.together()
        if self.world.cuda:
            torch.cuda._sleep(SPIN_CYCLES)
        run()
        self.world.sync()
        return watch.ms()


class ConcurrentCase:
    """A matmul and a collective of this rank's tensor."""

    def __init__(self, world: World, collective: str, mib: int, sizes: tuple[int, int, int]) -> None:
        self.world, self.collective, self.mib = world, collective, mib
        made = torch.Generator(world.device).manual_seed(world.rank)
        m, n, k = sizes

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=made, device=world.device).to(torch.bfloat16)

        self.a, self.b = draw(m, k), draw(k, n)
        self.product = self.a @ self.b
        rows = mib * 512 // world.ranks * world.ranks  # of 1024 bf16, 2 KiB
        self.x = draw(rows // world.ranks if collective == "all_gather" else rows, 1024)
        site = f"/concurrent.{collective}"
        self.tail: tuple[Any, ...] = (collective, "sum", torch.bfloat16, 0, False, "bulk", world.group, site)
        if collective == "all_to_all":
            splits = [rows // world.ranks] * world.ranks
            self.tail = (splits, splits, 0, False, "bulk", world.group, site)
        suffix = "all_to_all" if collective == "all_to_all" else "collective"
        ops.load()  # registers them
        self._start, self._finish = getattr(OPS, f"start_{suffix}"), getattr(OPS, f"finish_{suffix}")

    def call(self, watch: Stopwatch, has_collective: bool, has_matmul: bool) -> Callable[[], Tensor | None]:
        """Return a call. The stopwatch runs during the matmul, without one during the collective."""

        def call() -> Tensor | None:
            if not has_matmul:
                watch.note(0)
            token = self._start(self.x, *self.tail) if has_collective else None
            if has_matmul:
                watch.note(0)
                torch.mm(self.a, self.b, out=self.product)
                watch.note(1)
            result = self._finish(token, self.x, *self.tail) if has_collective else None
            if not has_matmul:
                watch.note(1)
            return result

        return call

    def check(self, result: Tensor) -> None:
        """Raise AssertionError where a result is not c10d's."""
        expected = torch.empty_like(result)
        if self.collective == "all_gather":
            dist.all_gather_into_tensor(expected, self.x)
        elif self.collective == "all_to_all":
            dist.all_to_all_single(expected, self.x)
        else:
            whole = self.x.float()
            dist.all_reduce(whole)
            expected = whole.chunk(self.world.ranks)[self.world.rank].to(result.dtype)
        difference = float((result.float() - expected.float()).abs().max() / expected.float().abs().max())
        if not difference <= (1e-2 if self.collective == "reduce_scatter" else 0.0):
            raise AssertionError(f"wrong numbers: {self.collective} differs from c10d by {difference:.3g}")

    def check_replay(self, replay: Callable[[], Any], result: Tensor) -> None:
        """Check what a replay writes into `result`. Collective."""
        result.zero_()
        self.world.barrier()  # a peer may write to `result` as soon as it replays
        replay()
        self.world.sync()
        self.check(result)

    def measure(self, rounds: int) -> dict[str, Any]:
        """Return milliseconds by column, and why some are missing."""
        world, parts = self.world, {"collective": (True, False), "alone": (False, True), "concurrent": (True, True)}
        row: dict[str, Any] = {"collective": self.collective, "mib": self.mib, "ms": {}, "why": {}}
        result = self.call(Stopwatch(world), *parts["concurrent"])()
        assert result is not None
        self.check(result)
        clock = StopwatchClock(world)
        for suffix in ("", "_g"):
            if suffix and not world.cuda:
                row["why"][suffix] = "needs CUDA"
                continue

            def time_all(captured: bool = bool(suffix)) -> dict[str, float]:
                calls: dict[str, Any] = {}
                for name, has in parts.items():
                    watch = Stopwatch(world, captured)
                    call: Call = self.call(watch, *has)
                    if captured:
                        call, result = capture_graph(call, world)
                        if name == "concurrent":
                            self.check_replay(call, result)
                    calls[name] = call, watch
                settle(calls["alone"][0], world)
                return clock.rounds(calls, rounds, 3)[0]

            times, why = world.agreed(time_all)
            row["ms"] |= {f"{name}{suffix}": ms for name, ms in (times or {}).items()}
            if why:
                row["why"][suffix] = why
        return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", default="32,128,512", help="of the whole tensor, comma-separated")
    parser.add_argument("--matmul", default="8192,8192,8192", help="M,N,K")
    parser.add_argument("--collectives", default=",".join(COLLECTIVES), help="comma-separated (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--json")
    args = parser.parse_args()
    m, n, k = (int(size) for size in args.matmul.split(","))
    if unknown := {*args.collectives.split(",")} - {*COLLECTIVES}:
        parser.error(f"{', '.join(sorted(unknown))}: expected collectives of {', '.join(COLLECTIVES)}")
    world = begin(NAME, args.device, step_timeout_s=20, init_timeout_s=60)
    document: dict[str, Any] = {"benchmark": NAME, **facts.facts(world, "benchmarks.concurrent_matmul")}
    document |= {"matmul": [m, n, k], "rows": []}
    for collective in args.collectives.split(","):
        for mib in map(int, args.mib.split(",")):
            with Deadline(f"{collective} of {mib} MiB", 120):
                document["rows"].append(ConcurrentCase(world, collective, mib, (m, n, k)).measure(args.rounds))
            if world.rank == 0 and args.json:
                facts.write(args.json, document)
    world.say(text(document))
    end(world, 0)


if __name__ == "__main__":
    main()

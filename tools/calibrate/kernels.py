"""Time the executor's kernels and small steps, from traces of calls with tiny matmuls, and whole calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ub_overlap.runtime import ops, settings
from ub_overlap.runtime.session import session

from ..rank_process import World
from .world import Burst, ProgressLine

MIB = 1 << 20
Trace = list[tuple[int, str, str, int, int, int]]
"""(step, queue, kind, begin ns, end ns, bytes)."""


def small_kernel(world: World, burst: Burst) -> float:
    """Return the microseconds of a minimal kernel in a sequence of them."""
    cell = torch.zeros(1, device=world.device)
    return world.worst([burst.us(lambda: cell.add_(1), 40, rounds=15, ahead=3)])[0]


def events(world: World, burst: Burst, kernel_us: float) -> float:
    """Return the microseconds from a kernel's end to the start of a kernel on another stream that waits for it."""
    current, side = torch.cuda.current_stream(), torch.cuda.Stream(priority=-1)
    cells = [torch.zeros(1, device=world.device) for _ in range(2)]
    marks = [torch.cuda.Event() for _ in range(2)]

    def call() -> None:
        cells[0].add_(1)
        marks[0].record(current)
        with torch.cuda.stream(side):
            side.wait_event(marks[0])
            cells[1].add_(1)
            marks[1].record(side)
        current.wait_event(marks[1])

    us = burst.us(call, 12, rounds=15, ahead=3)
    return world.worst([max(0.5, us / 2 - kernel_us)])[0]


class Calls:
    """Calls of the ops with a given transfer size, whose matmuls have 16 inner or outer columns. `ranks`: of the group."""

    def __init__(self, world: World, group: str = "", ranks: int = 0) -> None:
        """`group`, `ranks`: by default those of `world`."""
        self.world, self.group, self.ranks = world, group or world.group, ranks or world.ranks
        self.dtype = torch.bfloat16 if world.cuda else torch.float32
        self.cols = 8192 if world.cuda else 256
        self.item = torch.empty(0, dtype=self.dtype).element_size()
        ops.load()
        settings.configure(step_timeout_s=20, init_timeout_s=60)

    def tensor(self, *sizes: int) -> torch.Tensor:
        """Return a random tensor."""
        return torch.randn(*sizes, device=self.world.device).to(self.dtype)

    def gather(self, size: int) -> tuple[Callable[[], Any], str]:
        """Return a call that gathers shards of `size` bytes and keeps the result, and its site."""
        rows = max(1, size // (self.cols * self.item))
        shard, weight = self.tensor(rows, self.cols).unsqueeze(0), self.tensor(self.cols, 16)
        op: Any = torch.ops.ub_overlap.all_gather_matmul.default
        site = f"calibrate/gather {size}"
        args = (shard, [weight], [False], [False], 1, False, True, [], [], "pipelined:chunks=1", self.group, site)
        return lambda: op(*args), site

    def scatter(self, size: int) -> tuple[Callable[[], Any], str]:
        """Return a call that reduce_scatters shards of `size` bytes, and its site."""
        rows = max(1, size // (self.cols * self.item)) * self.ranks
        left, right = self.tensor(rows, 16), self.tensor(16, self.cols)
        op: Any = torch.ops.ub_overlap.matmul_reduce_scatter.default
        site = f"calibrate/scatter {size}"
        more = (None, 1, False, "sum", self.dtype, False, "plain", [], [], "pipelined:chunks=1", self.group, site)
        return lambda: op([left], [right], *more), site

    def traces(
        self, call_and_site: tuple[Callable[[], Any], str], count: int = 5, before: Callable[[], Any] = lambda: None
    ) -> list[Trace]:
        """Return the step times of `count` calls after two warm-up calls. `before` runs ahead of each. Collective."""
        call, site = call_and_site
        settings.configure(trace=True)
        try:
            traces = []
            for turn in range(count + 2):
                before()
                call()
                self.world.barrier()
                if turn > 1:
                    traces.append(list(ops.load().last_trace(site)))
            return traces
        finally:
            settings.configure(trace=False)


def spans(traces: list[Trace], queue: str, kind: str, share: float = 0.5) -> float:
    """Return the median microseconds of the steps of a kind on a queue, or the quantile `share`."""
    times = sorted((end - begin) / 1e3 for trace in traces for _, q, k, begin, end, _ in trace if (q, k) == (queue, kind))
    return times[int(share * (len(times) - 1))] if times else 0.0


def memory(world: World, calls: Calls, kernel_us: float, progress: ProgressLine, quick: bool) -> dict[str, list[list[float]]]:
    """Return curves of local copies (by bytes copied) and of reductions (by bytes read and written); on the CPU also of pushes.

    On CUDA a time stamp is a kernel too, so one kernel's time is subtracted.
    """
    sizes = [int(x * MIB) for x in ((1, 4, 16, 64) if world.cuda else (1 / 256, 1 / 16, 1, 4))][:: 2 if quick else 1]
    off = kernel_us if world.cuda else 0.0
    rows: dict[str, list[list[float]]] = {"copy": [], "reduce": [], "push": []}
    for size in sizes:
        gathers, scatters = calls.traces(calls.gather(size)), calls.traces(calls.scatter(size))
        rows["copy"].append([size, max(0.2, spans(gathers, "COMPUTE", "copy") - off)])
        rows["reduce"].append([size * (world.ranks + 1), max(0.2, spans(scatters, "COMPUTE", "reduce") - off)])
        rows["push"].append([size, max(0.2, spans(gathers, "COPY", "copy"))])
        progress.step("copies and reductions", 4)
    if world.cuda:
        del rows["push"]
        session.check(world.group)
    names = [(name, i) for name, points in rows.items() for i in range(len(points))]
    for (name, i), us in zip(names, world.worst([rows[n][i][1] for n, i in names]), strict=True):
        rows[name][i][1] = us
    return rows


def cpu_steps(world: World, calls: Calls) -> dict[str, float]:
    """Return the times of the CPU executor's small steps, by its own clocks."""
    gathers, scatters = calls.traces(calls.gather(4096), 15), calls.traces(calls.scatter(4096), 15)
    both = gathers + scatters
    signal, flag = spans(both, "COMPUTE", "signal"), spans(both, "COPY", "signal")
    # Most waits last as long as the peer is late; the shortest are those for data that had already arrived.
    satisfied, late = spans(both, "COMPUTE", "wait", 0.05), spans(both, "COMPUTE", "wait", 0.25)
    times = {"flag_us": flag, "signal_us": signal, "wait_us": satisfied, "arrive_us": late, "event_us": signal}
    return dict(zip(times, world.worst(list(times.values())), strict=True))


TimedCall = list[Any]
"""A timed whole call: [kind, ranks, dtype, M, N, K, strategy, us], with the sizes of one rank's matmul."""


def checks(world: World, burst: Burst, calls: Calls, progress: ProgressLine, quick: bool) -> list[TimedCall]:
    """Time whole calls, small ones first: their time minus that of their parts is the cost of small steps. Collective."""
    ranks = world.ranks
    shapes = [(512, 1024, 1024), (4096, 8192, 2048), (128, 512, 512), (2048, 4096, 4096)]
    if world.cuda:
        shapes += [(768, 2304, 6144), (768, 6144, 1536), (1536, 3072, 5120), (3072, 5120, 3072)]
    else:
        shapes = [(32, 64, 64), (128, 128, 128), (512, 256, 256)]
    strategies = ["pipelined:chunks=1", "pipelined", *([f"pipelined:chunks={2 * ranks}"] if world.cuda else [])]
    timed: list[TimedCall] = []
    for m, n, k in shapes[: 2 if quick else None]:
        rows = -(-m // (16 * ranks)) * 16 * ranks
        for kind in ("all_gather_matmul", "matmul_reduce_scatter"):
            for strategy in strategies:
                call = _whole_call(calls, kind, rows, n, k, strategy)
                count = 6 if world.cuda else 3
                us = burst.us(call, count, rounds=15, together=True, warm=4, ahead=2)
                timed.append([kind, ranks, str(calls.dtype)[6:], rows, n, k, strategy, us])
                progress.step("whole calls", 1)
    if world.cuda:
        session.check(world.group)
    for row, us in zip(timed, world.worst([row[-1] for row in timed]), strict=True):
        row[-1] = us
    return timed


def _whole_call(calls: Calls, kind: str, m: int, n: int, k: int, strategy: str) -> Callable[[], Any]:
    group, site = calls.world.group, f"calibrate/{kind} {m} {n} {k} {strategy}"
    weight = calls.tensor(n, k).t()
    if kind == "all_gather_matmul":
        shard = calls.tensor(m // calls.world.ranks, k).unsqueeze(0)
        op: Any = torch.ops.ub_overlap.all_gather_matmul.default
        return lambda: op(shard, [weight], [False], [False], 1, False, False, [], [], strategy, group, site)
    full = calls.tensor(m, k)
    op = torch.ops.ub_overlap.matmul_reduce_scatter.default
    return lambda: op([full], [weight], None, 1, False, "sum", calls.dtype, False, "plain", [], [], strategy, group, site)

"""Ranks of the project's own programs (calibration, benchmarks, GPU tests): start, agreement, deadlines and exit."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist


class RankProcess:
    """This process among the ranks of a program. `control`: a gloo group of all ranks, which launches no kernels."""

    rank: int
    ranks: int
    device: torch.device
    control: Any

    @property
    def cuda(self) -> bool:
        """The ranks compute on GPUs."""
        return self.device.type == "cuda"

    def say(self, *what: Any) -> None:
        """Print on rank 0."""
        if self.rank == 0:
            print(*what, flush=True)

    def sync(self) -> None:
        """Synchronize with this rank's device."""
        if self.cuda:
            torch.cuda.synchronize()

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order. Collective."""
        values: list[Any] = [None] * self.ranks
        dist.all_gather_object(values, value, group=self.control)
        return values


@dataclass
class World(RankProcess):
    """All ranks of a program. `group`: c10d name of a group of all ranks, for measured ops; `control`: the same over gloo."""

    rank: int
    ranks: int
    device: torch.device
    group: str
    control: Any

    @classmethod
    def join(cls, rank: int, ranks: int, device: torch.device, control_s: float) -> Self:
        """Make the default process group, which becomes `group`. Collective; call it under a `Deadline`.

        `device`: from `this_device`. `control_s`: timeout of `control` in seconds.
        """
        device_id: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, rank=rank, world_size=ranks, timeout=timedelta(seconds=90), **device_id)
        control: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=control_s))
        dist.barrier(group=control)
        torch.manual_seed(rank)
        default_group: Any = dist.group.WORLD
        return cls(rank, ranks, device, str(default_group.group_name), control)

    def barrier(self) -> None:
        """Wait until all ranks arrive with idle devices."""
        self.sync()
        dist.barrier(group=self.control)

    def worst(self, values: Sequence[float]) -> list[float]:
        """Return each value's maximum over the ranks, because a collective waits for the slowest."""
        if not values:
            return []
        result = torch.tensor(list(values), dtype=torch.float64)
        dist.all_reduce(result, op=dist.ReduceOp.MAX, group=self.control)
        return result.tolist()

    def agreed(self, body: Callable[[], Any]) -> tuple[Any, str]:
        """Return (result of `body`, "") if it succeeded on all ranks, else (None, the first error) on all ranks. Collective."""
        value, error = None, ""
        try:
            value = body()
            self.sync()
        except Exception as caught:  # noqa: BLE001  any failure is a reason
            error = f"rank {self.rank}: {type(caught).__name__}: {_summary(caught)}"[:300]
        errors = [text for text in self.gather(error) if text]
        return (None, errors[0]) if errors else (value, "")

    def new_group(self) -> str:
        """Make another group of all ranks and return its name. Collective."""
        group: Any = dist.new_group(backend="nccl" if self.cuda else "gloo")
        return str(group.group_name)


def _summary(error: Exception) -> str:
    """Return the first line of an error's message. A line that ends with a colon takes the next one too.

    Dynamo's begin with "backend='ub_overlap' raised:".
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    count = next((i for i, line in enumerate(lines, 1) if not line.endswith(":")), len(lines))
    return " ".join(lines[:count])


def capture_graph(call: Callable[[], Any], world: RankProcess, warm: int = 3) -> tuple[Callable[[], Any], Any]:
    """Capture `call` as a CUDA graph. Return (replay, the captured result, which every replay writes again)."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warm):
            call()
    torch.cuda.current_stream().wait_stream(side)
    world.sync()
    graph = torch.cuda.CUDAGraph()
    # thread_local: watchdog threads (NCCL's, ours) may query their events meanwhile
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = call()
    return graph.replay, out


def this_device(kind: str | None, rank: int) -> torch.device:
    """Return this rank's device and make it current. `kind`: "cuda", "cpu", or None for CUDA if available."""
    if (kind or ("cuda" if torch.cuda.is_available() else "cpu")) != "cuda":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
    torch.cuda.set_device(device)
    return device


def exit_process(code: int) -> None:
    """End the process without cleanup: a driver's cleanup may wait for a peer that is gone. Does not return."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


class Deadline:
    """Ends the process when the body takes longer: no other way interrupts a driver call. `last` runs before."""

    def __init__(self, name: str, seconds: float, last: Callable[[], Any] | None = None) -> None:
        self.name, self.seconds, self.last = name, seconds, last
        self.timer = threading.Timer(seconds, self._over)
        self.timer.daemon = True

    def _over(self) -> None:
        label = f"rank {os.environ.get('RANK')}: {self.name}"
        stderr = sys.__stderr__ or sys.stderr  # what pytest captures in sys.stderr is lost when the process ends
        try:
            print(f"{label}: not done after {self.seconds:g} s", file=stderr, flush=True)
            faulthandler.dump_traceback(file=stderr, all_threads=True)
            if self.last:
                self.last()
        finally:
            exit_process(3)

    def __enter__(self) -> None:
        self.timer.start()

    def __exit__(self, *_: object) -> None:
        self.timer.cancel()

"""The ranks of a program of our own (calibration, benchmarks, checks): how they join, agree, keep deadlines and end."""

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


class Member:
    """This process among the ranks of a program. `control`: a group of them all over gloo, which starts no kernel."""

    rank: int
    ranks: int
    device: torch.device
    control: Any

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def say(self, *what: Any) -> None:
        if self.rank == 0:
            print(*what, flush=True)

    def sync(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def gather(self, mine: Any) -> list[Any]:
        """What every rank brought, in rank order."""
        found: list[Any] = [None] * self.ranks
        dist.all_gather_object(found, mine, group=self.control)
        return found


@dataclass
class World(Member):
    """The ranks that take part together. `group`: c10d name of them all, for work; `control`: the same over gloo."""

    rank: int
    ranks: int
    device: torch.device
    group: str
    control: Any

    @classmethod
    def join(cls, rank: int, ranks: int, device: torch.device, control_s: float) -> Self:
        """Make the default process group, which is `group` then. Collective; give it a deadline.

        `device`: as `this_device` says. `control_s`: seconds that a rank may keep the others waiting at `control`.
        """
        more: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, rank=rank, world_size=ranks, timeout=timedelta(seconds=90), **more)
        control: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=control_s))
        dist.barrier(group=control)
        torch.manual_seed(rank)
        whole: Any = dist.group.WORLD
        return cls(rank, ranks, device, str(whole.group_name), control)

    def barrier(self) -> None:
        """All ranks have come here, and their devices have nothing to do."""
        self.sync()
        dist.barrier(group=self.control)

    def worst(self, values: Sequence[float]) -> list[float]:
        """Each value's maximum over the ranks: what waits for all waits for the slowest."""
        if not values:
            return []
        result = torch.tensor(list(values), dtype=torch.float64)
        dist.all_reduce(result, op=dist.ReduceOp.MAX, group=self.control)
        return result.tolist()

    def agreed(self, body: Callable[[], Any]) -> tuple[Any, str]:
        """(what `body` returned, "") if it worked on all ranks, else (None, why): then no rank goes on with it. Collective."""
        value, error = None, ""
        try:
            value = body()
            self.sync()
        except Exception as caught:  # noqa: BLE001  any failure is a reason
            first = (str(caught).splitlines() or [""])[0]
            error = f"rank {self.rank}: {type(caught).__name__}: {first}"[:300]
        errors = [text for text in self.gather(error) if text]
        return (None, errors[0]) if errors else (value, "")

    def new_group(self) -> str:
        """The name of another group of all ranks."""
        made: Any = dist.new_group(backend="nccl" if self.cuda else "gloo")
        return str(made.group_name)


def this_device(kind: str | None, rank: int) -> torch.device:
    """Where this rank computes, made current. `kind`: "cuda", "cpu", or None for CUDA where there is one."""
    if (kind or ("cuda" if torch.cuda.is_available() else "cpu")) != "cuda":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
    torch.cuda.set_device(device)
    return device


def leave(code: int) -> None:
    """End the process, whatever state the devices are in: what a driver would still tidy up may wait for a peer that has gone.
    Does not return."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


class Deadline:
    """Ends the process when the body takes longer: nothing else gets a thread out of a driver call. `last` runs before."""

    def __init__(self, name: str, seconds: float, last: Callable[[], Any] | None = None) -> None:
        self.name, self.seconds, self.last = name, seconds, last
        self.timer = threading.Timer(seconds, self._over)
        self.timer.daemon = True

    def _over(self) -> None:
        who = f"rank {os.environ.get('RANK')}: {self.name}"
        try:
            print(f"{who}: not done after {self.seconds:g} s", file=sys.stderr, flush=True)
            faulthandler.dump_traceback(all_threads=True)
            if self.last:
                self.last()
        finally:
            leave(3)

    def __enter__(self) -> None:
        self.timer.start()

    def __exit__(self, *_: object) -> None:
        self.timer.cancel()

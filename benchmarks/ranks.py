"""The ranks of a benchmark under torchrun: start, agreement between them, deadlines, end."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


@dataclass
class World:
    """This process among the ranks that take part. `group`: c10d name of all of them; `control`: the same over gloo."""

    rank: int
    ranks: int
    device: torch.device
    group: str
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

    def barrier(self) -> None:
        """All ranks have come here, and their devices have nothing to do."""
        self.sync()
        dist.barrier(group=self.control)

    def gather(self, mine: Any) -> list[Any]:
        """What every rank brought, in rank order."""
        found: list[Any] = [None] * self.ranks
        dist.all_gather_object(found, mine, group=self.control)
        return found

    def worst(self, values: Sequence[float]) -> list[float]:
        """Each value's maximum over the ranks."""
        result = torch.tensor(list(values), dtype=torch.float64)
        dist.all_reduce(result, op=dist.ReduceOp.MAX, group=self.control)
        return result.tolist()

    def agreed(self, body: Callable[[], Any]) -> tuple[Any, str]:
        """(what `body` returned, "") if it worked on all ranks, else (None, why): then no rank goes on with it."""
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
        return str(dist.new_group(backend="nccl" if self.cuda else "gloo").group_name)


def start(tp: int | None = None, device: str | None = None) -> World | None:
    """Join the first `tp` ranks of torchrun (all by default). None on a rank that has no part: it may end at once.

    ValueError outside of torchrun, or for more ranks than it started.
    """
    if "RANK" not in os.environ:
        raise ValueError("no RANK in the environment: start with torchrun --nproc-per-node N -m ...")
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if tp is not None and not 1 <= tp <= ranks:
        raise ValueError(f"--tp {tp}: expected 1 to {ranks}, the ranks that torchrun started")
    ranks = tp or ranks
    if rank >= ranks:
        return None
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    where = torch.device(kind, int(os.environ.get("LOCAL_RANK", rank))) if kind == "cuda" else torch.device("cpu")
    with Deadline("start", 180):
        more: dict[str, Any] = {}
        if kind == "cuda":
            torch.cuda.set_device(where)
            _refuse_multicast(where)
            more["device_id"] = where
        backend = "nccl" if kind == "cuda" else "gloo"
        dist.init_process_group(backend, rank=rank, world_size=ranks, timeout=timedelta(seconds=90), **more)
        control = dist.new_group(backend="gloo", timeout=timedelta(seconds=300))
        dist.barrier(group=control)
    torch.manual_seed(rank)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")  # 2.13 renames collectives
    whole: Any = dist.group.WORLD
    return World(rank, ranks, where, str(whole.group_name), control)


def _refuse_multicast(device: torch.device) -> None:
    from torch._C._autograd import DeviceType

    from ub_overlap import _torch_compat as compat

    if compat._SymmetricMemory.has_multicast_support(DeviceType.CUDA, device.index):
        raise RuntimeError("NVLink multicast is on: TORCH_SYMM_MEM_DISABLE_MULTICAST=1 must be set before torch is imported")


def end(world: World, code: int) -> None:
    """Leave together, whatever state the devices are in. Does not return."""
    with Deadline("end", 60):
        dist.barrier(group=world.control)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class Deadline:
    """Ends the process when the body takes longer: nothing else gets a thread out of a driver call. `last` runs before."""

    def __init__(self, name: str, seconds: float, last: Callable[[], Any] | None = None) -> None:
        self.name, self.seconds, self.last = name, seconds, last
        self.timer = threading.Timer(seconds, self._over)
        self.timer.daemon = True

    def _over(self) -> None:
        print(f"rank {os.environ.get('RANK')}: {self.name}: not done after {self.seconds:g} s", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(all_threads=True)
        try:
            if self.last:
                self.last()
        finally:
            sys.stdout.flush()
            os._exit(3)

    def __enter__(self) -> None:
        self.timer.start()

    def __exit__(self, *_: object) -> None:
        self.timer.cancel()

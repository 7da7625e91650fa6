"""One rank of a fault trial: its group, a typical call, and what it observed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.gpu import cases, split_cases
from tests.gpu.cases import Maker
from ub_overlap import _torch_compat
from ub_overlap.runtime import errors, ops, settings
from ub_overlap.runtime.schedule.steps import SLOTS
from ub_overlap.runtime.session import session
from ub_overlap.runtime.session.bind import find_session

from .steps import STEPS, make_step

Outs = list[torch.Tensor]


@dataclass
class Seen:
    """The observations of one rank.

    `error`, `ranks`, `text`: the first error. `seconds`: its delay after the fault. `after`: the error of the next call.
    `outputs`: "nan", "right" (the call had ended before), "none" (the op raised at once) or "WRONG". `notes`: remarks.
    """

    error: str = ""
    ranks: tuple[int, ...] = ()
    text: str = ""
    seconds: float = 0.0
    after: str = ""
    outputs: str = ""
    calls: int = 0
    notes: str = ""


class Scene:
    """A rank with its group, a case of `kind` ("plain AG" for a plain collective), and the expected result without faults.

    `kind` may also be a whole training step (steps.py).
    `victim`: the rank at fault. `bound`: make the group's session by a first call.
    """

    def __init__(self, rank: int, world: int, device: str, kind: str, deadline: float, victim: int, bound: bool = True) -> None:
        self.rank, self.victim, self.cuda = rank, victim, device == "cuda"
        gpus = torch.cuda.device_count() if self.cuda else 0
        self.device = torch.device("cuda", rank % gpus) if self.cuda else torch.device("cpu")
        if self.cuda:
            torch.cuda.set_device(self.device)
        limits = {"step_timeout_s": deadline, "init_timeout_s": 60.0 if bound else deadline}
        settings.configure(**limits, shared_gpus=self.cuda and world > gpus)
        torch.manual_seed(rank)
        self.group = str(dist.group.WORLD.group_name)  # type: ignore[union-attr]
        self.store = _torch_compat.store_of(dist.group.WORLD)
        self.make = Maker(self.device, world)
        self.step = make_step(kind, self.device) if kind in STEPS else None
        self.graph: Any = None
        self.kind = "AG" if kind == "graph" else kind
        self.size = 2048 if self.cuda else 64
        op = self.kind.removeprefix("plain ")
        if self.step is None:
            self.case, self.strategy = self.make.kind(op, self.size)
        if op != self.kind:
            self.strategy = "none"
        self.outs: Outs = []
        self.expected: Outs = []
        if not bound:
            dist.barrier()
            return
        if self.kind == "A2A rounds":
            self.op(case=split_cases.with_small_pieces(self.case))
        self.expected = [t.clone() for t in self.op()]
        self.settle()
        if kind == "graph":
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self.outs = self.op()
        self.settle()
        if self.step is not None:
            return
        core = next(core for core in ops.extension().sessions() if core.group == self.group)
        assert core.transport == ("symmetric memory" if self.cuda else "shared memory"), core.reason
        assert self.kind != "A2A rounds" or self.areas_bytes() < split_cases.PIECE_BYTES, "a piece takes one round"

    def op(self, site: str = "", case: Any = None) -> Outs:
        if self.step is not None:
            return self.step()
        return cases.run_op(case or self.case, self.strategy, self.group, site or f"fault.{self.kind}")

    def start(self) -> torch.Tensor:
        """Start the split collective of the scene, at the site of its calls."""
        return split_cases.start(self.case, self.strategy, self.group, f"fault.{self.kind}")

    def finish_start(self, token: torch.Tensor) -> Outs:
        """Return the outputs of the collective that `start` began."""
        return split_cases.finish(token, self.case, self.strategy, self.group, f"fault.{self.kind}")

    def areas_bytes(self) -> int:
        """Return the bytes of the first split slot."""
        found = find_session(self.group, self.device.type)
        assert found is not None
        return int(found._arena.bytes_of_slot(SLOTS))

    def call(self) -> None:
        if self.graph is not None:
            self.graph.replay()
        else:
            self.outs = self.op()

    @property
    def is_victim(self) -> bool:
        return self.rank == self.victim

    def record_fault(self) -> None:
        """Publish the time of the fault."""
        self.store.set("fault", repr(time.time()))

    def fault_time(self) -> float:
        self.store.wait(["fault"], timedelta(seconds=5))
        return float(self.store.get("fault"))

    def call_until_error(self, seconds: float) -> Seen:
        """Call in a loop and return the error."""
        calls = 0

        def body() -> None:
            nonlocal calls
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                for _ in range(4):
                    self.call()
                    calls += 1
                self.look()

        seen = self.attempt(body, self.fault_time)
        seen.calls = calls
        return seen

    def strike_later(self, strike: Callable[[], None], seconds: float = 0.5) -> None:
        """Run `strike` on the victim, on another thread, while it calls."""
        if not self.is_victim:
            return

        def run() -> None:
            self.record_fault()
            strike()

        threading.Timer(seconds, run).start()

    def settle(self) -> None:
        self.sync()
        session.check(self.group)
        dist.barrier()

    def sync(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def look(self) -> None:
        self.sync()
        session.check(self.group)

    def watch(self, seconds: float) -> None:
        """Look for an error of the group, without calls."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.look()
            time.sleep(0.05)

    def attempt(self, body: Callable[[], Any], begin: Callable[[], float]) -> Seen:
        """Return the error that `body` raises. `begin`: time of the fault."""
        seen = Seen()
        try:
            body()
        except Exception as error:  # noqa: BLE001  reported to the test program
            seen.seconds = time.time() - begin()
            seen.error, seen.text = type(error).__name__, str(error)
            seen.ranks = tuple(getattr(error, "ranks", ()))
            if not isinstance(error, errors.UbOverlapError):
                seen.notes = "not an error of ub_overlap"
        return seen

    def finish(self, seen: Seen) -> dict[str, Any]:
        """Check the outputs of the last call and the error of one more call."""
        if seen.error:
            self.sync()
            kinds = set()
            for got, right in zip(self.outs, self.expected, strict=True) if self.outs else ():
                if got.numel():  # outputs that were not requested are empty
                    kinds.add("nan" if bool(got.isnan().all()) else "right" if torch.equal(got, right) else "WRONG")
            seen.outputs = "WRONG" if "WRONG" in kinds else ", ".join(sorted(kinds)) or "none"
            try:
                self.op()
                self.look()
            except errors.UbOverlapError as error:
                seen.after = type(error).__name__
            except RuntimeError as error:
                if self.step is None:
                    raise
                seen.after = type(error).__name__  # DDP refuses a module whose backward failed
        return asdict(seen)

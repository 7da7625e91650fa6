"""Rank functions of test_faults.py: rank 1 fails, and every living rank returns its observations.

Ranks are processes of tests/runtime/spawn.py, with a gloo world. Every function returns a `Seen` as a dict.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.gpu import cases
from tests.gpu.cases import Maker
from ub_overlap import _torch_compat
from ub_overlap.runtime import errors, ops, settings
from ub_overlap.runtime.session import session

GUILTY = 1
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
    """A rank with its group, a case of `kind`, and the expected result without faults."""

    def __init__(self, rank: int, world: int, device: str, kind: str, deadline: float) -> None:
        self.rank, self.cuda = rank, device == "cuda"
        self.device = torch.device("cuda", rank) if self.cuda else torch.device("cpu")
        if self.cuda:
            torch.cuda.set_device(self.device)
        settings.configure(step_timeout_s=deadline, init_timeout_s=60.0)
        torch.manual_seed(rank)
        self.group = str(dist.group.WORLD.group_name)  # type: ignore[union-attr]
        self.store = _torch_compat.store_of(dist.group.WORLD)
        self.make = Maker(self.device, world)
        self.graph: Any = None
        self.kind = "AG" if kind == "graph" else kind
        self.size = 2048 if self.cuda else 64
        self.case, self.strategy = self.make.kind(self.kind, self.size)
        self.outs: Outs = []
        self.expected = [t.clone() for t in self.op()]
        self.settle()
        if kind == "graph":
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self.outs = self.op()
        self.settle()
        core = next(core for core in ops.extension().sessions() if core.group == self.group)
        assert core.transport == ("symmetric memory" if self.cuda else "shared memory"), core.reason

    def op(self, site: str = "", case: Any = None) -> Outs:
        return cases.run_op(case or self.case, self.strategy, self.group, site or f"fault.{self.kind}")

    def call(self) -> None:
        if self.graph is not None:
            self.graph.replay()
        else:
            self.outs = self.op()

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
        return asdict(seen)


def dies(rank: int, world: int, device: str, kind: str, how: str, deadline: float) -> dict[str, Any]:
    """Send the signal `how` to rank 1 while all ranks call in a loop."""
    scene = Scene(rank, world, device, kind, deadline)
    if rank == GUILTY:

        def strike() -> None:
            scene.store.set("fault", repr(time.time()))
            os.kill(os.getpid(), getattr(signal, how))

        threading.Timer(0.5, strike).start()
    calls = [0]

    def on_and_on() -> None:
        end = time.monotonic() + 30 + 3 * deadline
        while time.monotonic() < end:
            for _ in range(4):
                scene.call()
                calls[0] += 1
            scene.look()

    def struck() -> float:
        scene.store.wait(["fault"], timedelta(seconds=5))
        return float(scene.store.get("fault"))

    seen = scene.attempt(on_and_on, struck)
    seen.calls = calls[0]
    return scene.finish(seen)


def skips(rank: int, world: int, device: str, kind: str, how: str, deadline: float) -> dict[str, Any]:
    """Rank 1 skips its last call (`how` "last"), or skips it and calls another site (`how` "next")."""
    scene = Scene(rank, world, device, kind, deadline)
    for _ in range(3):
        scene.call()
    scene.settle()
    begin = time.time()

    def body() -> None:
        if rank != GUILTY:
            scene.call()
            scene.look()
        elif how == "next":
            scene.outs = scene.op(site="fault.next")
            scene.look()
        else:
            others = [f"done/{other}" for other in range(world) if other != GUILTY]
            scene.store.wait(others, timedelta(seconds=4 * deadline + 10))
            session.check(scene.group)

    seen = scene.attempt(body, lambda: begin)
    scene.store.set(f"done/{rank}", "1")
    if rank == GUILTY and how == "last":
        scene.outs = scene.expected  # of its last call before the fault
    return scene.finish(seen)


def differs(rank: int, world: int, device: str, kind: str, how: str, deadline: float) -> dict[str, Any]:
    """Rank 1 passes another shape (`how` "shape") or calls another site (`how` "site"), without arena growth."""
    scene = Scene(rank, world, device, kind, deadline)
    size = scene.size // 2 + (16 if rank == GUILTY and how == "shape" else 0)
    case, _ = scene.make.kind(scene.kind, size)
    scene.settle()
    begin = time.time()

    def body() -> None:
        scene.outs = scene.op(site=f"fault.{'two' if rank == GUILTY and how == 'site' else 'one'}", case=case)
        scene.look()

    scene.outs = []
    seen = scene.attempt(body, lambda: begin)
    scene.expected = [torch.zeros_like(t) for t in scene.outs]  # only NaN is right
    return scene.finish(seen)


def slow(rank: int, world: int, device: str, kind: str, how: str, deadline: float) -> dict[str, Any]:
    """Rank 1 is late by 0.6 of the deadline, on the host or on the device. Expect no error and right numbers."""
    scene = Scene(rank, world, device, kind, deadline)
    begin = time.time()

    def body() -> None:
        for _ in range(2):
            if rank == GUILTY:
                if how == "device" and scene.cuda:
                    torch.cuda._sleep(int(0.6 * deadline * 1.8e9))
                else:
                    time.sleep(0.6 * deadline)
            scene.call()
            scene.look()
            bad = [i for i, (a, b) in enumerate(zip(scene.outs, scene.expected, strict=True)) if not torch.equal(a, b)]
            assert not bad, f"outputs {bad} are wrong"

    seen = scene.attempt(body, lambda: begin)
    seen.seconds = time.time() - begin
    return asdict(seen)

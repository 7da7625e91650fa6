"""Rank functions of test_flight.py."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

import ub_overlap
from ub_overlap.runtime import errors, ops, settings
from ub_overlap.runtime.session import abort_signal, flight, watchdog

from . import rank_ops
from .rank_failures import attempt
from .rank_sessions import gather, reset

C = ops.extension()


def records(rank: int, world: int, calls: int) -> dict[str, Any]:
    """Make calls of two shapes at two sites, some of them plain collectives."""
    group = dist.new_group(list(range(world)))
    name = group.group_name
    for number in range(calls):
        strategy = "none" if number % 10 == 9 else "pipelined"
        gather(name, rank, world, 4 + number % 2, site=f"/site.{number % 2}", strategy=strategy)
    (row,) = ub_overlap.flight_record(group)
    dist.barrier()
    return row


def fails(rank: int, world: int, folder: str) -> dict[str, Any]:
    """The last rank skips a call. Return the file that the error names, and whether the rank itself wrote one."""
    name = dist.new_group(list(range(world))).group_name
    with reset():
        settings.configure(step_timeout_s=1.5, flight_dir=folder)
        for number in range(3):
            gather(name, rank, world, 4, site=f"/site.{number}")
        dist.barrier()
        path, text = "", ""
        if rank != world - 1:
            try:
                gather(name, rank, world, 4, site="/skipped")
            except errors.UbOverlapError as error:
                path, text = error.flight_record, str(error)
        dist.barrier()
        end = time.monotonic() + 10
        while not (files := list(Path(folder).glob(f"rank{rank}-*-{os.getpid()}.json"))) and time.monotonic() < end:
            time.sleep(0.05)  # the watchdog of the rank that skipped the call writes it
        again = attempt(lambda: gather(name, rank, world, 4))
        dist.barrier()
        settings.configure(flight_dir="")
        return {"group": name, "path": path, "text": text, "files": len(files), "again": again["text"]}


def signalled(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Rank 0 gets SIGUSR1 while its only Python thread waits in an op. The op ends well."""
    name = rank_ops.group()
    settings.configure(step_timeout_s=60.0, flight_dir=folder)
    gather(name, rank, world, 4)
    dist.barrier()
    if rank == 0:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    else:
        end = time.monotonic() + 20
        while not list(Path(folder).glob("rank0-*.json")) and time.monotonic() < end:
            time.sleep(0.05)
    found = attempt(lambda: gather(name, rank, world, 4))
    child = os.fork()
    if child == 0:  # a forked child has no watchdog: the signal ends it, as it did before
        with contextlib.suppress(BaseException):
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(5)
        os._exit(0)
    found["child"] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    faulthandler.register(signal.SIGUSR1)  # a handler of the program replaces ours
    found["taken"] = C.catch_dump_signal()
    return found


def _until(condition: Callable[[], object]) -> bool:
    end = time.monotonic() + 20
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return bool(condition())


def signalled_at_first_calls(rank: int, world: int, folder: str) -> list[dict[str, Any]]:
    """Rank 0 gets SIGUSR1 in the first call of a group, and again in that of a group made after its destruction."""
    settings.configure(init_timeout_s=60.0, flight_dir=folder)
    return _signalled_at_first_call(rank, world, folder) + _signalled_at_first_call(rank, world, folder)


def _signalled_at_first_call(rank: int, world: int, folder: str) -> list[dict[str, Any]]:
    """Rank 0 waits in its first call for the other, which comes once there is a file."""

    def interrupt() -> None:
        if _until(lambda: flight._Last.owns_signal and abort_signal.signals()):
            os.kill(os.getpid(), signal.SIGUSR1)

    def files() -> list[Path]:
        return list(Path(folder).glob("rank0-*.json"))

    group, found = dist.new_group(list(range(world))), []
    name = group.group_name
    if rank == 0:
        threading.Thread(target=interrupt, daemon=True).start()
    else:
        found.append({"file": _until(files)})
    found.append(attempt(lambda: gather(name, rank, world, 4)))
    dist.destroy_process_group(group)
    del group
    found.append({"ended": _until(lambda: watchdog._watchdog._thread is None)})
    dist.barrier()
    if rank == 0:
        for file in files():
            file.unlink()
    dist.barrier()
    return found


def switched_off(rank: int, world: int, folder: str) -> dict[str, Any]:
    before = settings.current().flight_calls
    settings.configure(flight_calls=0, flight_dir=folder)
    try:
        (row,) = [records(rank, world, 3)]
        return {"records": row["records"], "path": flight.dump("a test"), "files": os.listdir(folder)}
    finally:
        settings.configure(flight_calls=before, flight_dir="")

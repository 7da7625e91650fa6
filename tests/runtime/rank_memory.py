"""Rank functions of test_memory.py."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import subprocess
import time
from typing import Any

import torch.distributed as dist

from tests.harness.shared_memory import list_mappings, list_processes_with_mappings, list_segments
from ub_overlap.runtime import settings
from ub_overlap.runtime.session.store_exchange import Exchange

from . import rank_ops
from .rank_failures import attempt, fresh
from .rank_sessions import C, gather, reset

MANY_ROWS = 400_000
PR_SET_DUMPABLE = 4


def _mapped_bytes() -> int:
    return sum(list_mappings("self").values())


def _die_at(topic: str) -> None:
    """Kill this process when it arrives at an exchange."""
    original = Exchange.gather

    def gather_or_die(self: Any, at: str, *rest: Any) -> Any:
        if at.startswith(topic):
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, at, *rest)

    Exchange.gather = gather_or_die  # type: ignore[method-assign]


def killed_growing(rank: int, world: int, topic: str) -> Any:
    """Rank 1 dies during a growth: before its peers attach to its larger segment, or after."""
    settings.configure(init_timeout_s=60.0, step_timeout_s=60.0)
    gather(rank_ops.group(), rank, world, 4)
    dist.barrier()
    before = _mapped_bytes()
    if rank == 1:
        _die_at(topic)
    found = attempt(lambda: gather(rank_ops.group(), rank, world, MANY_ROWS))
    segments = sorted(list_mappings("self"))
    return {
        **found,
        "before": before,
        "after": _mapped_bytes(),
        "open": list_segments(),
        "segments": segments,
        "processes": list_processes_with_mappings(segments),
    }


def unreachable(rank: int, world: int) -> Any:
    """Rank 1 is closed to its peers, as a process is that changes its user."""
    name, was_root = fresh(world), os.geteuid() == 0
    if was_root:  # the superuser may open anything
        os.setresuid(65534, 65534, 0)
    elif rank == 1:
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0)
    bad = gather(name, rank, world, 4, site="/unreachable")
    if was_root:
        os.setresuid(0, 0, 0)
    stats = C.site_stats()["/unreachable"]
    return {"bad": bad, "transport": stats["transport"], "reason": stats["reason"], "open": sorted(list_segments())}


def interrupted(rank: int, world: int) -> Any:
    """Every allocation of more than 100 KiB is interrupted by a signal; then every allocation is."""
    name = fresh(world)
    with reset():
        settings.configure(step_timeout_s=2.0)
        C.testing.set_interrupted_allocation(100 << 10)
        bad = gather(name, rank, world, 60_000)
        C.testing.set_interrupted_allocation(0)
        return bad, attempt(lambda: C.ShmArena(rank=0, ranks=2, slot_bytes=1 << 20))


def addresses(rank: int, world: int) -> Any:
    """Return why addresses that are not a peer's segment are refused; the last one is right."""
    arenas = [C.ShmArena(rank=r, ranks=2, slot_bytes=1 << 16) for r in range(2)]
    control, data = arenas[1].control_address, arenas[1].data_address
    pid, number, name = data.split(":")
    other = os.open("/dev/null", os.O_RDWR)
    tries = [
        (control, f"{pid}:{number}:{name[:-1]}{'1' if name[-1] == '0' else '0'}"),  # another random name
        (control, f"{pid}:{other}:{name}"),  # a descriptor that was reused
        (control, f"{pid}:99999:{name}"),
        (data, data),  # of another size
    ]
    with reset():
        reasons = [arenas[0].attach(1, *pair) for pair in tries]
        good = arenas[0].attach(1, control, data)
    arenas[1].stop_sharing()
    closed = arenas[0].attach(1, control, data)
    return reasons, good, closed, attempt(lambda: arenas[0].attach(1, "/etc/passwd", data))["error"]


def limits_of_a_segment(rank: int, world: int) -> Any:
    """Return what a peer can do to a segment's size, its mode, and whether a program that is started inherits it."""
    arena = C.ShmArena(rank=0, ranks=2, slot_bytes=1 << 16)
    number = int(arena.data_address.split(":")[1])
    wrong = []
    for size in (1 << 16, 1 << 20):
        try:
            os.ftruncate(number, size)
            wrong.append(f"resized to {size}")
        except PermissionError:
            pass
    listing = subprocess.run(["ls", "-l", "/proc/self/fd"], capture_output=True, text=True, check=True, timeout=20).stdout
    child = os.fork()
    if child == 0:
        os._exit(len(list_mappings("self")))
    return wrong, oct(os.fstat(number).st_mode & 0o777), "ub_overlap" in listing, os.waitpid(child, 0)[1]


def released_at_destroy(rank: int, world: int) -> Any:
    """Return the mapped bytes before a group, with it, and after its end, while this function still refers to it."""
    settings.configure(step_timeout_s=3.0)
    before = _mapped_bytes()
    group = dist.new_group(list(range(world)))
    bad = gather(group.group_name, rank, world, 4)
    bound = _mapped_bytes()
    failed = attempt(lambda: gather(group.group_name, rank, world, 5 if rank else 4))["error"]
    dist.barrier()
    failed_bytes = _mapped_bytes()
    dist.destroy_process_group(group)
    end = time.monotonic() + 10
    gc.disable()
    while _mapped_bytes() > before and time.monotonic() < end:
        time.sleep(0.05)
    return {"bad": bad, "failed": failed, "bytes": [before, bound, failed_bytes, _mapped_bytes()], "group": group.size()}

"""Rank functions of test_blame.py: one rank delays the group, and every error must name it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from typing import Any

import torch
import torch.distributed as dist

from ub_overlap.runtime import settings

from .oracle import data
from .rank_failures import attempt
from .rank_sessions import gather, reset, scatter

OPS = torch.ops.ub_overlap


def _all_reduce(name: str, rank: int, world: int, rows: int, site: str = "/r") -> None:
    lhs, rhs = data(rows * world, 5, seed=rank), data(5, 3, seed=98)
    OPS.matmul_all_reduce([lhs], [rhs], None, "sum", torch.float32, False, [], [], "pipelined", name, site)


CALLS = {"AG": gather, "RS": scatter, "AR": _all_reduce}


def pause(pids: list[int], seconds: float) -> None:
    """Stop processes for some seconds, this one too. A shell continues them."""
    text = " ".join(map(str, pids))
    subprocess.Popen(["sh", "-c", f"kill -STOP {text}; sleep {seconds}; kill -CONT {text}"])


def delays(rank: int, world: int, kind: str, how: str, victim: int, step_s: float) -> dict[str, Any]:
    """The victim is late, stopped, skips the last call, or skips a call and makes another. Return the error of this rank."""
    name = dist.new_group(list(range(world))).group_name
    call = CALLS[kind]
    with reset():
        settings.configure(step_timeout_s=60.0)
        for _ in range(2):
            call(name, rank, world, 6)
        settings.configure(step_timeout_s=step_s)
        dist.barrier()
        if rank == victim:
            if how == "stopped":
                pause([os.getpid()], 2.5 * step_s)
                time.sleep(0.3)
            if how in ("late", "skips the last"):
                time.sleep(2.0 * step_s)
            if how == "skips one":
                found = attempt(lambda: call(name, rank, world, 6, site="/other"))
            else:
                found = attempt(lambda: None if how == "skips the last" else call(name, rank, world, 6))
        else:
            if how == "skips one":  # the victim waits for its first peer, so it reports the failure first
                time.sleep(0.2 + 0.02 * ((rank - victim) % world))
            found = attempt(lambda: call(name, rank, world, 6))
        dist.barrier()
        return found


def is_killed(rank: int, world: int, kind: str, victim: int) -> dict[str, Any]:
    name = str(dist.group.WORLD.group_name)  # type: ignore[union-attr]
    settings.configure(step_timeout_s=60.0)
    CALLS[kind](name, rank, world, 6)
    dist.barrier()
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    return attempt(lambda: CALLS[kind](name, rank, world, 6))


def is_killed_while_memory_grows(rank: int, world: int, victim: int) -> dict[str, Any]:
    """The victim dies before a call that needs more memory. Rank 1 comes to it after rank 0 has failed."""
    name = str(dist.group.WORLD.group_name)  # type: ignore[union-attr]
    settings.configure(step_timeout_s=60.0)
    gather(name, rank, world, 6)
    dist.barrier()
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        time.sleep(2.5)
    return attempt(lambda: gather(name, rank, world, 1 << 17))


def is_late_while_memory_grows(rank: int, world: int, victim: int, step_s: float) -> dict[str, Any]:
    """The victim lives, and does not come to a call that needs more memory. Rank 1 comes just before the deadline of rank 0."""
    name = dist.new_group(list(range(world))).group_name
    with reset():
        gather(name, rank, world, 6)
        dist.barrier()
        settings.configure(step_timeout_s=step_s)
        if rank == 1:
            time.sleep(0.7 * step_s)
        found = attempt(lambda: rank == victim or gather(name, rank, world, 1 << 17))
        dist.barrier()
        return found


def all_stopped(rank: int, world: int, where: str, step_s: float) -> dict[str, Any]:
    """The whole job is stopped for longer than the deadline while it waits, and continued. Nothing has failed."""
    name = dist.new_group(list(range(world))).group_name
    pids: list[Any] = [None] * world
    dist.all_gather_object(pids, os.getpid())
    with reset():
        if where == "op":
            gather(name, rank, world, 4)
        dist.barrier()
        settings.configure(step_timeout_s=step_s, init_timeout_s=step_s)
        if rank == world - 1:
            pause(pids, 2.5 * step_s)
            for _ in range(8):
                time.sleep(0.1)  # in pieces: the rest is slept after the stop
        return attempt(lambda: gather(name, rank, world, 4))

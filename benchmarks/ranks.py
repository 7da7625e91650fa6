"""Start and end the ranks of a benchmark under torchrun."""

from __future__ import annotations

import os
import sys
import warnings

import torch
import torch.distributed as dist

from ub_overlap import _torch_compat as compat
from ub_overlap.tools.rank_process import Deadline, World, exit_process, this_device


def start(tp: int | None = None, device: str | None = None) -> World | None:
    """Join the first `tp` ranks of torchrun (all by default). Return None on other ranks, which may end at once.

    ValueError outside torchrun, or for more ranks than torchrun started.
    """
    if "RANK" not in os.environ:
        raise ValueError("no RANK in the environment: start with torchrun --nproc-per-node N -m ...")
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if tp is not None and not 1 <= tp <= ranks:
        raise ValueError(f"--tp {tp}: expected 1 to {ranks}, the ranks that torchrun started")
    ranks = tp or ranks
    if rank >= ranks:
        return None
    with Deadline("start", 180):
        where = this_device(device, rank)
        if where.type == "cuda":
            _refuse_multicast(where)
        world = World.join(rank, ranks, where, control_s=300)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")  # 2.13 renames collectives
    return world


def begin(name: str, device: str | None, step_timeout_s: float, init_timeout_s: float, ranks: int | None = None) -> World:
    """Join the first `ranks` ranks of torchrun (all by default) and load our ops, with these deadlines.

    Exit on other ranks, and with an error of the benchmark `name` where `start` raises one.
    """
    try:
        world = start(ranks, device)
    except ValueError as error:
        sys.exit(f"benchmarks.{name}: {error}")
    if world is None:
        sys.exit(0)
    from ub_overlap.runtime import ops, settings

    ops.load()
    settings.configure(step_timeout_s=step_timeout_s, init_timeout_s=init_timeout_s)
    return world


def _refuse_multicast(device: torch.device) -> None:
    if compat._SymmetricMemory.has_multicast_support(compat._DeviceType.CUDA, device.index):
        raise RuntimeError("NVLink multicast is on: TORCH_SYMM_MEM_DISABLE_MULTICAST=1 must be set before torch is imported")


def end(world: World, code: int) -> None:
    """Leave together. Does not return."""
    with Deadline("end", 60):
        dist.barrier(group=world.control)
    exit_process(code)

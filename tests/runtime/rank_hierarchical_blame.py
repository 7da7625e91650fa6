"""Rank functions of test_hierarchical_blame.py: the two halves of a hierarchical collective, and a rank that does not come.

Ranks 0 1 2 3 on hosts a a b b: rank 0 waits for rank 2 across hosts and for rank 1 within its host.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import torch.distributed as dist

import ub_overlap
from ub_overlap.runtime import settings
from ub_overlap.runtime.session.host_groups import name_host_groups
from ub_overlap.runtime.session.host_layout import find_layout

from .oracle import data
from .rank_failures import attempt, fresh
from .rank_sessions import reset
from .rank_split import finish, start

VICTIM = 3


def run_halves(group: str, collective: str, rank: int) -> None:
    """Run a gather across hosts and then within each, a reduce_scatter the other way."""
    layout = find_layout(group)
    assert layout is not None
    halves = (layout.across, layout.within) if collective == "all_gather" else (layout.within, layout.across)
    shard = data(8, 4, seed=rank)
    for slot, name in enumerate(halves):
        shard = finish(name, collective, start(name, collective, shard, slot), shard, slot)


def observe(group: str, collective: str, rank: int) -> dict[str, Any]:
    """Return the error of this rank, and the ranks of its flight records by group."""
    found = attempt(lambda: run_halves(group, collective, rank))
    rows = ub_overlap.flight_record()
    own = [row for row in rows if row["records"] and row["group"].startswith(f"{group}.")]
    found["flight"] = {row["group"].rpartition(".")[2]: (row["rank"], row["members"]) for row in own}
    return found


def is_killed(rank: int, world: int, collective: str) -> dict[str, Any]:
    """The victim dies after a collective that went well."""
    group = str(dist.group.WORLD.group_name)  # type: ignore[union-attr]
    settings.configure(hosts="2", step_timeout_s=60.0)
    name_host_groups()
    run_halves(group, collective, rank)
    dist.barrier()
    if rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    return observe(group, collective, rank)


def stays_away(rank: int, world: int, collective: str, step_s: float) -> dict[str, Any]:
    """The victim lives, and does not come."""
    with reset():
        settings.configure(hosts="2", step_timeout_s=60.0)
        group = fresh(world)
        name_host_groups()
        run_halves(group, collective, rank)
        settings.configure(step_timeout_s=step_s)
        dist.barrier()
        found = {} if rank == VICTIM else observe(group, collective, rank)
        dist.barrier()
        return found

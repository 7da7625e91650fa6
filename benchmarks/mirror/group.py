"""A c10d group of R ranks in two processes, both of which are its rank 0, and the session of our ops on it.

The group has a backend of its own name, over torch's fake process group: its size is R, and its plain collectives do nothing.
"""

from __future__ import annotations

import itertools
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ub_overlap import _torch_compat as compat
from ub_overlap.runtime import ops
from ub_overlap.runtime.extension import extension
from ub_overlap.runtime.ops.schedule_provider import ScheduleProvider
from ub_overlap.runtime.session import bind as binding
from ub_overlap.runtime.session import watchdog
from ub_overlap.runtime.session.arena_size import SIZE_STEP, round_slot_bytes
from ub_overlap.runtime.session.session import Session
from ub_overlap.runtime.session.store_exchange import Exchange
from ub_overlap.tools.rank_process import World

from . import PROCESSES
from .arena import MirrorShmArena, MirrorSymmetricArena
from .schedule import MirrorProvider

BACKEND = "mirror"
_numbers = itertools.count(1)


def _register_group(name: str, ranks: int, store: Any) -> None:
    """Register a fake process group of `ranks` ranks, of which this process is the first, as a group of `BACKEND`.

    Unlike torch's fake groups it exists next to a real default group."""
    if not hasattr(dist.Backend, BACKEND.upper()):
        creator: Any = compat.new_fake_group
        dist.Backend.register_backend(BACKEND, creator, extended_api=True, devices=["cpu", "cuda"])
    members = list(range(ranks))
    made, _ = compat.new_named_group(ranks, 0, members, BACKEND, store, name, timeout=timedelta(minutes=5))
    distributed_c10d._world.pg_group_ranks[made] = {rank: rank for rank in members}


"""Numbers of the groups of this process: torch keeps their names for good."""


class MirrorSession(Session):
    """The session of a mirrored group. Growth and tuning are agreed between the two processes."""

    def verify(self, digest: str, op: str, site: str) -> None:
        """Do nothing: plans are for R ranks, and there are two."""


class MirrorGroups:
    """Makes groups of `ranks` ranks over the two processes of `world`. From then on, every group of our ops is one of these."""

    def __init__(self, world: World, ranks: int) -> None:
        """ValueError where `world` has not two processes. Collective."""
        if world.ranks != PROCESSES:
            raise ValueError(f"mirror mode runs on {PROCESSES} processes, got {world.ranks}")
        if ranks < 3:
            raise ValueError(f"mirror mode is for groups of more than {PROCESSES} ranks, got {ranks}")
        self.world, self.ranks = world, ranks
        extension().testing.set_mirrored(True)
        ops.install(MirrorProvider(), self._bind)

    def close(self) -> None:
        """Close the sessions, and serve real groups again."""
        extension().close_all()
        extension().testing.set_mirrored(False)
        ops.install(ScheduleProvider(), binding.bind)

    def new_group(self) -> str:
        """Make a group, and return its c10d name. Collective."""
        name = f"mirror_{self.ranks}_{next(_numbers)}"
        _register_group(name, self.ranks, compat.store_of(compat.group_of(self.world.group)))
        dist.barrier(group=self.world.control)
        return name

    def _bind(self, group: str, device: str, slot_bytes: int, op: str, site: str) -> Session:
        """Make the session of a group together with the other process."""
        world, doing = self.world, f"the first call of group '{group}'"
        exchange = Exchange(compat.store_of(compat.group_of(group)), group, device, world.rank, PROCESSES, op, site)
        sizes = exchange.gather("hosts", {"slot": slot_bytes}, "init", doing)
        slot = round_slot_bytes(max(size["slot"] for size in sizes))
        host = MirrorShmArena(self.ranks, SIZE_STEP if device == "cuda" else slot)
        try:
            host.attach(exchange.gather("arena", host.addresses, "init", doing)[1 - world.rank])
            exchange.gather("attached", {}, "init", doing)
        finally:
            host.stop_sharing()
        arena: Any = host
        if device == "cuda":
            arena = MirrorSymmetricArena(host, world.group, world.rank, slot)
            tokens = exchange.gather("allocated", {"name": arena.data_address}, "init", doing)
            arena.rendezvous([token["name"] for token in tokens])
            exchange.gather("ready", {}, "init", doing)
        core = extension().Session(
            group=group, device=device, rank=0, ranks=self.ranks, arena=arena.core, transport="mirror", reason=""
        )
        session = MirrorSession(core, exchange, arena)
        session.abort.attach(core)
        watchdog.watch(session)
        return session

"""The hosts of a group's ranks, as every rank knows them at compile time, without asking the others.

From the setting `hosts`, else from a launcher that gives all hosts the same number of ranks (LOCAL_WORLD_SIZE, as torchrun sets
it), else one host. Decisions need them before the group binds. They only choose between strategies: when the group binds, the
ranks compare the hosts that they really are on (host.py, bind.py), and calls run on the transport that follows.
"""

from __future__ import annotations

import os

import torch.distributed as dist

from ub_overlap import _torch_compat as compat

from .. import errors, settings


def hosts_of(group: str) -> tuple[str, ...]:
    """Return a name of the host of each rank of `group`, by rank in the group. OptionError for a bad setting `hosts`."""
    members = compat.group_of(group)
    ranks = compat.global_ranks(members)
    if len(ranks) != members.size():  # a group outside of torch's registry
        return ("",) * members.size()
    world = world_hosts()
    return tuple(world[rank] if world else "" for rank in ranks)


def own_host() -> str:
    """Return the host that the setting `hosts` declares for this rank, "" without the setting."""
    if not settings.current().hosts or not dist.is_available() or not dist.is_initialized():
        return ""
    return world_hosts()[dist.get_rank()]


def world_hosts() -> tuple[str, ...]:
    """Return the host of each rank of the world; () where nothing says that there are several."""
    declared, ranks = settings.current().hosts, dist.get_world_size()
    if declared:
        names = declared.split(",")
        if len(names) == 1 and names[0].isdigit() and 0 < int(names[0]) <= ranks and ranks % int(names[0]) == 0:
            return tuple(str(rank // int(names[0])) for rank in range(ranks))
        if len(names) == ranks:
            return tuple(name.strip() for name in names)
        raise errors.OptionError(
            "the setting 'hosts' does not fit the world",
            where=f"ub_overlap.configure(hosts=...) or {settings.environment_name('hosts')}",
            got=f"{declared!r}, {ranks} ranks",
            expected="the number of ranks of each host, which divides the world, or one name for every rank: '0,0,1,1'",
        )
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    is_launched = os.environ.get("WORLD_SIZE") == str(ranks) and os.environ.get("RANK") == str(dist.get_rank())
    if is_launched and local.isdigit() and 0 < int(local) < ranks and ranks % int(local) == 0:
        return tuple(str(rank // int(local)) for rank in range(ranks))
    return ()
